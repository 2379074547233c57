"""The SDK's own traces and spans, observed as they start and finish: agents, and the work done for them.

This is not a trace processor: processors get nothing when tracing is disabled, and the user may replace them all. The
SDK creates its spans in both cases (`NoOpSpan` when disabled) and starts them in the execution context of the work, so
the methods of both kinds are wrapped. No processor is added or removed, and nothing additional is exported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from agents.tracing import spans as sdk_spans
from agents.tracing import traces as sdk_traces

from lightning_openai_agents import FRAMEWORK
from lightning_openai_agents.models import MODEL, begin_call, response_of
from lightning_openai_agents.requests import requests_of, take_by_name, tell_handoff
from lightning_openai_agents.tools import error_text, fail_tool, note_answer_of_sdk, tool_facts, waits_for_approval
from lightning_spans.record.context import current, settle_context
from lightning_spans.record.instrument.patches import replace
from lightning_spans.record.instrument.scope import Scope, current_scope
from lightning_spans.record.instrument.tracker import EventTracker, begins, ends
from lightning_spans.schema import spans as names

if TYPE_CHECKING:
    from opentelemetry.context import Context

    from lightning_spans.hooks import OpenSpan, Recorder
    from lightning_spans.record.instrument.tool_requests import ToolRequest

_FOLLOWED: Final = MODEL | {"trace", "agent", "function", "handoff"}
_NOT_FOUND: Final = frozenset({"Tool not found", "Custom tool not found"})  # the SDK's message about an unknown tool


def bind(recorder: Recorder) -> Iterator[Callable[[], None]]:
    """Patch every trace and span of the SDK; what is yielded removes each patch."""
    sdk = SdkTracker(recorder, FRAMEWORK)
    yield sdk.stop
    for kind in (sdk_spans.SpanImpl, sdk_spans.NoOpSpan, *_traces()):
        yield replace(kind, "start", sdk.wrap_start)
        yield replace(kind, "finish", sdk.wrap_finish)
    for kind in (sdk_spans.SpanImpl, sdk_spans.NoOpSpan):
        yield replace(kind, "set_error", sdk.wrap_set_error)


def _traces() -> list[type]:
    known = ("TraceImpl", "NoOpTrace", "ReattachedTrace")  # the last one since 0.10, for resumed runs
    return [getattr(sdk_traces, name) for name in known if hasattr(sdk_traces, name)]


def _kind(sdk: Any) -> str:
    data = getattr(sdk, "span_data", None)
    return "trace" if data is None else str(data.type)


class SdkScope(Scope):
    """The work that a span or trace of the SDK stands for, from its start to its finish."""

    __slots__ = ("asked", "handled", "kind", "sdk", "used")

    def __init__(self, sdk: Any, kind: str, here: Context) -> None:
        super().__init__(here)
        self.sdk = sdk
        self.kind = kind
        self.handled = sys.exception()  # the agent runs within the program's `except` block: not its own failure
        self.used = False  # an agent began within it
        self.asked: list[ToolRequest] = []  # of an agent: the tool calls of its model's last answer
        if kind == "agent":
            around = self.outer
            while isinstance(around, SdkScope):
                around.used, around = True, around.outer

    def is_mask(self) -> bool:
        """Whether the SDK created a trace only to hide another one, or nothing, while tracing is disabled."""
        return self.kind == "trace" and self.sdk.trace_id == "no-op" and not (self.used or self.seen)

    def raised(self) -> BaseException | None:
        """Return the exception that is propagating through this work."""
        error = sys.exception()
        return None if error is self.handled or isinstance(error, GeneratorExit) else error


class SdkTracker(EventTracker[SdkScope]):
    """Starts and ends spans with the SDK's.

    Its scopes are identified by the id of the SDK's object, which they hold.
    """

    def stop(self) -> None:
        """End what is open, except masks, and stop listening."""
        for scope in list(self.scopes.values()):
            if scope.is_mask():
                self.drop(scope.span)
        super().stop()

    def wrap_start(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the start of a span or trace."""

        def start(sdk: Any, mark_as_current: bool = False) -> Any:
            answer = original(sdk, mark_as_current)
            kind = _kind(sdk)
            if mark_as_current and kind in _FOLLOWED and id(sdk) not in self.scopes:
                self._started(sdk, kind)
            return answer

        return start

    def wrap_finish(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the finish of a span or trace."""

        def finish(sdk: Any, reset_current: bool = False) -> Any:
            if id(sdk) in self.scopes:
                self._finished(sdk)
            return original(sdk, reset_current)

        return finish

    def wrap_set_error(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the report of an error. It is kept even if the SDK does not keep it."""

        def set_error(sdk: Any, error: Any) -> Any:
            if self.live and isinstance(error, Mapping) and error.get("message") in _NOT_FOUND:
                with self.guard():
                    self._refused(str((error.get("data") or {}).get("tool_name")), str(error["message"]))
            scope = self.scopes.get(id(sdk))
            if scope is not None:
                with self.guard(scope.span):
                    # The SDK reports within its `except`. Its message hides what a tool raised (0.24).
                    fail_tool(scope, scope.raised() or error_text(error))
            return original(sdk, error)

        return set_error

    @begins
    def _started(self, sdk: Any, kind: str) -> None:
        here = current()
        context = settle_context(here)
        scope = SdkScope(sdk, kind, here)
        if kind == "trace" and isinstance(scope.outer, SdkScope) and scope.is_mask():
            return
        if kind in MODEL:
            begin_call(self, scope, sdk.span_data, context)
        else:
            scope.span = self._span(scope, sdk, kind, context)
        self.enter(id(sdk), scope, context)

    def _span(self, scope: SdkScope, sdk: Any, kind: str, context: Context) -> OpenSpan | None:
        if kind == "agent":
            return self.begin_agent(sdk.span_data.name, context)
        if kind == "handoff":
            return self.begin(names.EXECUTE_TOOL, "handoff", context=context)
        if kind == "function":
            name = sdk.span_data.name
            take_by_name(_asked_around(scope), name)
            return self.begin(names.EXECUTE_TOOL, name, context=context, attributes={names.TOOL_NAME: name})
        group = {names.CONVERSATION_ID: getattr(sdk, "group_id", None)}
        name = sdk.name if sdk.name != "no-op" else "Agent workflow"
        return self.begin(names.INVOKE_WORKFLOW, name, context=context, attributes=group)

    @ends
    def _finished(self, sdk: Any) -> None:
        scope = self.leave(id(sdk))
        if scope is None or not self.live:
            return
        if scope.kind == "function":
            note_answer_of_sdk(scope, sdk.span_data.output)
        error = scope.error or scope.raised()
        if scope.call is not None:
            _asked_around(scope)[:] = requests_of(sdk.span_data)
            scope.call.end(lambda: response_of(sdk.span_data), error=error)
        elif scope.is_mask() or (scope.kind == "function" and waits_for_approval(sdk.span_data)):
            self.drop(scope.span)
        else:
            if scope.kind == "handoff" and scope.span is not None:
                tell_handoff(scope.span, sdk.span_data.to_agent, _asked_around(scope))
            facts = tool_facts(sdk.span_data, scope.span) if scope.kind == "function" else None
            self.end(scope.span, error=error, attributes=facts)

    def _refused(self, name: str, why: str) -> None:
        """Record the call of an unknown tool. No tool runs, and the SDK reports an error on the surrounding span."""
        request = take_by_name(_asked_around(current_scope()), name)
        call_id, arguments = (request.call_id, str(request.arguments)) if request is not None else (None, "")
        self.end(self.begin_tool(name, call_id, arguments), error=f"{why}: {name}")


def _asked_around(around: Scope | None) -> list[ToolRequest]:
    """Return the tool calls that the surrounding agent waits for."""
    while isinstance(around, SdkScope) and around.kind != "agent":
        around = around.outer
    return around.asked if isinstance(around, SdkScope) else []
