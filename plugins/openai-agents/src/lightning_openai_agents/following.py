"""The SDK's own traces and spans, followed as they start and finish: they tell who is at work.

Not by a trace processor: processors hear nothing when tracing is disabled, and the user may replace them all. The SDK
makes its spans either way (`NoOpSpan` when disabled) and starts them in the execution context of what they stand for,
so the methods of both kinds are wrapped. No processor is added or removed, and nothing is exported because of us.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

from agents.tool_context import ToolContext
from agents.tracing import spans as sdk_spans
from agents.tracing import traces as sdk_traces

from lightning_openai.elsewhere import OtherCall, to_json
from lightning_spans import spans as names
from lightning_spans.context import current, current_agent, settled
from lightning_spans.patches import Undo, replace, replace_in_subclasses
from lightning_spans.recorder import current_span, log_failure
from lightning_spans.stays import Stay, current_watch

if TYPE_CHECKING:
    from opentelemetry.context import Context

    from lightning_spans.recorder import OpenSpan, Recorder
    from lightning_spans.spans import Json

PLUGIN: Final = "lightning_openai_agents"
FRAMEWORK: Final = "openai-agents"
_NOT_ASKED: Final = frozenset({"base_url", "model_impl"})  # in a model's settings, but not sent
_MODEL: Final = frozenset({"generation", "response"})
_FOLLOWED: Final = _MODEL | {"trace", "agent", "function"}


def bind(recorder: Recorder) -> Callable[[], None]:
    """Follow every trace and span of the SDK, until the callable that is given back is called."""
    following = Following(recorder)
    undo = Undo()
    undo.add(following.stop)
    for kind in (sdk_spans.SpanImpl, sdk_spans.NoOpSpan, *_traces()):
        undo.add(replace(kind, "start", following.wrap_start))
        undo.add(replace(kind, "finish", following.wrap_finish))
    for kind in (sdk_spans.SpanImpl, sdk_spans.NoOpSpan):
        undo.add(replace(kind, "set_error", following.wrap_set_error))
    undo.add(replace(ToolContext, "from_agent_context", following.wrap_from_agent_context))
    if find_spec("mcp") is not None:
        from agents.mcp.server import MCPServer

        undo.add(replace_in_subclasses(MCPServer, "call_tool", following.wrap_call_tool))
    return undo


def _traces() -> list[type]:
    known = ("TraceImpl", "NoOpTrace", "ReattachedTrace")  # the last one since 0.10, for runs that are resumed
    return [getattr(sdk_traces, name) for name in known if hasattr(sdk_traces, name)]


class Work(Stay):
    """What a span or trace of the SDK stands for, from its start to its finish."""

    __slots__ = ("error", "handled", "kind", "sdk", "span", "used")

    def __init__(self, sdk: Any, kind: str, here: Context) -> None:
        super().__init__(here)
        self.sdk = sdk
        self.kind = kind
        self.span: OpenSpan | None = None
        self.error: BaseException | str | None = None
        self.handled = sys.exception()  # the agent runs inside somebody's `except`: no failure of its own
        self.used = False  # an agent began in it
        if kind == "agent":
            around = self.outer
            while isinstance(around, Work):
                around.used, around = True, around.outer

    def is_mask(self) -> bool:
        """Whether it is a trace that the SDK made only to hide another one, or nothing, while tracing is disabled."""
        return self.kind == "trace" and self.sdk.trace_id == "no-op" and not (self.used or self.seen)

    def raised(self) -> BaseException | None:
        """Give the exception that is on its way through this work."""
        error = sys.exception()
        return None if error is self.handled or isinstance(error, GeneratorExit) else error


class Following:
    """Begins and ends our spans with the SDK's."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._live = True
        self._works: dict[int, Work] = {}  # by the id of the SDK's object, which the work holds

    def stop(self) -> None:
        """End what is open, and hear no more."""
        self._live = False
        for work in reversed(list(self._works.values())):
            with self._recorder.guard(PLUGIN):
                self._end(work)

    def wrap_start(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Begin when a span or trace of the SDK starts."""

        def start(sdk: Any, mark_as_current: bool = False) -> Any:
            answer = original(sdk, mark_as_current)
            if self._live and mark_as_current and id(sdk) not in self._works:
                try:
                    self._begin(sdk)
                except Exception as error:  # noqa: BLE001 - logged
                    log_failure(PLUGIN, error)
            return answer

        return start

    def wrap_finish(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """End when it finishes."""

        def finish(sdk: Any, reset_current: bool = False) -> Any:
            work = self._works.get(id(sdk))
            if work is not None:
                try:
                    self._end(work)
                except Exception as error:  # noqa: BLE001 - logged
                    log_failure(PLUGIN, error, work.span)
            return original(sdk, reset_current)

        return finish

    def wrap_set_error(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Keep what went wrong, also where the SDK does not."""

        def set_error(sdk: Any, error: Any) -> Any:
            work = self._works.get(id(sdk))
            if work is not None:
                with self._recorder.guard(PLUGIN, work.span):
                    # The SDK reports inside its `except`. Its own words hide what a tool raised (0.24).
                    work.error = work.raised() or _error_text(error)
            return original(sdk, error)

        return set_error

    def wrap_from_agent_context(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Take a tool call's id and arguments, which the SDK's span has not, or only if it may hold data."""

        def from_agent_context(cls: Any, context: Any, tool_call_id: Any, *args: Any, **kwargs: Any) -> Any:
            answer = original(cls, context, tool_call_id, *args, **kwargs)
            tool = current_span()
            if self._live and tool is not None and tool.operation == names.EXECUTE_TOOL:
                with self._recorder.guard(PLUGIN, tool):
                    tool_call = kwargs.get("tool_call", args[0] if args else None)
                    asker = kwargs.get("agent", args[1] if len(args) > 1 else None)
                    if tool.agent is None and asker is not None:  # approved: it runs before its agent's span (0.20)
                        tool.agent = asker.name
                    if names.TOOL_CALL_ID not in tool.attributes:
                        arguments = getattr(tool_call, "arguments", None)
                        tool.set(**{names.TOOL_CALL_ID: tool_call_id, names.TOOL_ARGUMENTS: arguments})
            return answer

        return from_agent_context

    def wrap_call_tool(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A server of tools carries out a call; of one that failed the SDK keeps the text alone."""

        async def call_tool(server: Any, *args: Any, **kwargs: Any) -> Any:
            answer = await original(server, *args, **kwargs)
            if self._live and (getattr(answer, "isError", False) or getattr(answer, "is_error", False)):
                with self._recorder.guard(PLUGIN):
                    work: Any = current_watch()
                    while work is not None and getattr(work, "kind", None) != "function":
                        work = getattr(work, "outer", None)
                    if work is not None:
                        work.error = " ".join(str(getattr(part, "text", "")) for part in answer.content)
            return answer

        return call_tool

    def _begin(self, sdk: Any) -> None:
        data: Any = getattr(sdk, "span_data", None)
        kind = "trace" if data is None else data.type
        if kind not in _FOLLOWED:
            return
        here = current()
        context = settled(here)
        work = Work(sdk, kind, here)
        if kind == "agent":
            known = {names.FRAMEWORK: FRAMEWORK}
            work.span = self._recorder.start(
                names.INVOKE_AGENT, data.name, agent=data.name, context=context, attributes=known
            )
        elif kind == "function":
            tool = {names.FRAMEWORK: FRAMEWORK, names.TOOL_NAME: data.name}
            work.span = self._recorder.start(
                names.EXECUTE_TOOL, data.name, agent=current_agent(context), context=context, attributes=tool
            )
        elif kind == "trace":
            if isinstance(work.outer, Work) and work.is_mask():
                return
            group = {names.FRAMEWORK: FRAMEWORK, names.CONVERSATION_ID: getattr(sdk, "group_id", None)}
            name = sdk.name if sdk.name != "no-op" else "Agent workflow"
            work.span = self._recorder.start(names.INVOKE_WORKFLOW, name, context=context, attributes=group)
        elif kind in _MODEL:
            self._follow_call(work, context)
        self._works[id(sdk)] = work
        work.enter(context if work.span is None else work.span.context)

    def _end(self, work: Work) -> None:
        self._works.pop(id(work.sdk), None)
        work.leave()
        error = work.error or work.raised()
        if work.kind in _MODEL:
            if work.call is not None and (self._live or work.call.named):
                work.call.end(lambda: _bodies(work)[1], error=error)
            return
        if work.span is None or work.is_mask():
            return
        if work.kind == "function":
            work.span.set(**_tool_facts(work))
        work.span.end(error=error)

    def _follow_call(self, work: Work, context: Context) -> None:
        """See to the chat span of a model that the wire may not see: LiteLLM, or Responses over a websocket."""
        OtherCall(
            self._recorder,
            PLUGIN,
            FRAMEWORK,
            lambda: _bodies(work)[0],
            at_once=False,
            endpoint="/chat/completions" if work.kind == "generation" else "/responses",
            place=lambda: context,
            stay=work,
        )


def _error_text(error: Any) -> str:
    """Give an error of the SDK as text: its message, and the detail where it has one."""
    if not isinstance(error, Mapping):
        return str(error)
    data = error.get("data")
    detail = data.get("error") if isinstance(data, Mapping) else None
    return f"{error.get('message')}: {detail}" if detail else str(error.get("message"))


def _tool_facts(work: Work) -> dict[str, Json]:
    """Give what the span of a tool knows when it is over."""
    data, span = work.sdk.span_data, work.span
    facts: dict[str, Json] = {}
    if data.output is not None:
        facts[names.TOOL_RESULT] = data.output if isinstance(data.output, str) else to_json(data.output)
    if span is not None and names.TOOL_ARGUMENTS not in span.attributes:
        facts[names.TOOL_ARGUMENTS] = data.input
    return facts


def _bodies(work: Work) -> tuple[dict[str, Json], dict[str, Json] | None]:
    """Give request and response of a model call, as far as the SDK has told them by now."""
    return (_generation if work.kind == "generation" else _response)(work.sdk.span_data)


def _generation(data: Any) -> tuple[dict[str, Json], dict[str, Json] | None]:
    """Give request and response of a generation span, as bodies of a chat completion."""
    given = (data.model_config or {}).items()
    settings = {key: value for key, value in given if value is not None and key not in _NOT_ASKED}
    request = {**settings, "model": data.model, "messages": list(data.input or [])}
    if not data.output:
        return request, None
    choices = [{"index": index, "message": _message(message)} for index, message in enumerate(data.output)]
    return request, {"object": "chat.completion", "model": data.model, "choices": choices, "usage": data.usage}


def _message(output: Mapping[str, Json]) -> Mapping[str, Json]:
    """Give what a model answered as a message; of a stream, the SDK keeps it as a body of `/responses`."""
    if output.get("object") != "response":
        return output
    items = output.get("output") or ()
    texts = [part.get("text") or "" for item in items for part in item.get("content") or ()]
    calls = [
        {
            "id": item.get("call_id"),
            "type": "function",
            "function": {"name": item["name"], "arguments": item["arguments"]},
        }
        for item in items
        if item.get("type") == "function_call"
    ]
    message: dict[str, Json] = {"role": "assistant", "content": "".join(texts) or None}
    return {**message, "tool_calls": calls} if calls else message


def _response(data: Any) -> tuple[dict[str, Json], dict[str, Json] | None]:
    """Give request and response of a response span, as bodies of `/responses`."""
    given = [] if data.input is None else data.input
    if data.response is None:
        return {"input": given}, None
    response = data.response.model_dump(mode="json", exclude_unset=True)
    told = ("model", "instructions", "tools", "temperature", "top_p", "max_output_tokens")
    return {"input": given, **{key: response[key] for key in told if response.get(key) is not None}}, response
