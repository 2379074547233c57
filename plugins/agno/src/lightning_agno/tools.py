"""Tool spans, also for tool calls that Agno rejects, and for a team leader's delegation to a member.

Agno runs a tool in one place and builds the message for the model in another. A tool may be a generator that does its
work while Agno collects its items; a delegation is one.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from agno.models.base import Model
from agno.tools.function import FunctionCall

from lightning_agno import FRAMEWORK
from lightning_agno.own_code import OwnCode
from lightning_openai.json_text import to_json
from lightning_spans.record.context import entered_iteration, entered_steps, use_context
from lightning_spans.record.instrument.patches import replace
from lightning_spans.record.instrument.tracker import Tracker
from lightning_spans.record.replay import keep_whole
from lightning_spans.schema import spans as names

if TYPE_CHECKING:
    from lightning_spans.hooks import OpenSpan, Recorder

DELEGATE: Final = "delegate_task_to_member"
_NOBODY: Final = "Member with ID "  # how Agno's message about an unknown tool begins


def bind(recorder: Recorder) -> Iterator[Callable[[], None]]:
    """Patch Agno to record every tool call; what is yielded removes each patch."""
    tools = AgnoTools(recorder, FRAMEWORK)
    yield tools.stop
    yield replace(FunctionCall, "execute", tools.wrap_execute)
    yield replace(FunctionCall, "aexecute", tools.wrap_aexecute)
    yield replace(Model, "create_function_call_result", tools.wrap_result)
    yield replace(Model, "get_function_calls_to_run", tools.wrap_prepare)
    yield replace(Model, "create_tool_call_limit_error_result", tools.wrap_limit)


@dataclass(slots=True)
class Running:
    """A tool call in progress.

    Attributes:
        span: its tool span.
        raised: exception of the tool's own code.
        text: result, for calls whose result is not sent to a model.
        failed: Agno's message if the tool could not run.
        end_ns: when the tool finished; Unix time in nanoseconds.
    """

    span: OpenSpan
    raised: list[BaseException] = field(default_factory=list)
    text: str | None = None
    failed: str | None = None
    end_ns: int | None = None


class AgnoTools(Tracker):
    """Starts and ends tool spans around Agno's tool calls."""

    def __init__(self, recorder: Recorder, framework: str) -> None:
        super().__init__(recorder, framework)
        self._running: dict[int, Running] = {}  # by the id of Agno's call

    def wrap_execute(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a synchronous tool call."""

        def execute(call: Any, *args: Any, **kwargs: Any) -> Any:
            running = self._begin(call)
            if running is None:
                return original(call, *args, **kwargs)
            with self._inside(running, call):
                outcome = original(call, *args, **kwargs)
            self._over(running, call, outcome)
            return outcome

        return execute

    def wrap_aexecute(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap an asynchronous tool call."""

        async def aexecute(call: Any, *args: Any, **kwargs: Any) -> Any:
            running = self._begin(call)
            if running is None:
                return await original(call, *args, **kwargs)
            with self._inside(running, call):
                outcome = await original(call, *args, **kwargs)
            self._over(running, call, outcome)
            return outcome

        return aexecute

    def wrap_result(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the building of the result message for the model."""

        def create(model: Any, function_call: Any, *args: Any, **kwargs: Any) -> Any:
            message = original(model, function_call, *args, **kwargs)
            running = self._running.pop(id(function_call), None)
            if running is not None:
                with self.guard(running.span):
                    self._end(running, _text(message.content), failed=bool(message.tool_call_error))
            return message

        return create

    def wrap_prepare(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the reading of a model's answer. Agno answers calls that it cannot run at once."""

        def prepare(model: Any, assistant_message: Any, messages: Any, *args: Any, **kwargs: Any) -> Any:
            known = len(messages)
            calls = original(model, assistant_message, messages, *args, **kwargs)
            with self.guard():
                self._refuse(assistant_message.tool_calls or (), messages[known:])
            return calls

        return prepare

    def wrap_limit(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the rejection of a call because the agent has reached its limit of tool calls."""

        def refuse(model: Any, function_call: Any, *args: Any, **kwargs: Any) -> Any:
            message = original(model, function_call, *args, **kwargs)
            with self.guard():
                span = self.begin_tool(function_call.function.name, function_call.call_id, _arguments(function_call))
                self.end(span, error=_text(message.content))
            return message

        return refuse

    def _begin(self, call: Any) -> Running | None:
        span = self.begin_tool(call.function.name, call.call_id, _arguments(call))
        if span is None:
            return None
        if span.name == DELEGATE:
            with self.guard(span):
                # the generator's name, once it starts
                span.set(**{names.HANDOFF: (call.arguments or {}).get("member_id")})
        running = self._running[id(call)] = Running(span)
        weakref.finalize(call, self._left, id(call)).atexit = False
        return running

    @contextmanager
    def _inside(self, running: Running, call: Any) -> Iterator[None]:
        try:
            with use_context(running.span.context), OwnCode(call.function, running.span, running.raised):
                yield
        except BaseException as error:
            self._running.pop(id(call), None)
            self.end(running.span, error=error)
            raise

    def _over(self, running: Running, call: Any, outcome: Any) -> None:
        """Record a tool's result. A generator still has to run."""
        with self.guard(running.span):
            running.end_ns = time.time_ns()
            result = outcome.result
            if outcome.status != "success":
                running.failed = outcome.error or "the tool failed"
            elif isinstance(result, Generator):
                outcome.result = call.result = self._read(running, result)
            elif isinstance(result, AsyncGenerator):
                outcome.result = call.result = self._aread(running, result)
            else:
                running.text = _text(getattr(result, "content", result))

    def _read(self, running: Running, items: Generator[Any, None, None]) -> Generator[Any, None, None]:
        with self._reading(running):
            inner = entered_iteration(running.span.context, items)
            try:
                yield from inner
            finally:
                inner.close()

    async def _aread(self, running: Running, items: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
        with self._reading(running):
            inner = entered_steps(running.span.context, items)
            try:
                async for item in inner:
                    yield item
            finally:
                await inner.aclose()

    @contextmanager
    def _reading(self, running: Running) -> Iterator[None]:
        try:
            yield
        except GeneratorExit:
            self.end(running.span, attributes={names.ABANDONED: True})
            raise
        except BaseException as error:
            self.end(running.span, error=error)
            raise
        running.end_ns = time.time_ns()

    def _end(self, running: Running, text: str | None, *, failed: bool) -> None:
        if running.span.name == DELEGATE and (text or "").startswith(_NOBODY):
            running.span.attributes.pop(names.HANDOFF, None)
            keep_whole(running.span, text)  # the error was returned, not raised
            failed = True
        told = text or running.failed or "the tool failed"
        error = (running.raised[-1] if running.raised else told) if failed else None
        self.end(running.span, error=error, attributes={names.TOOL_RESULT: text}, end_ns=running.end_ns)

    def _left(self, key: int) -> None:
        """End a call whose result is not sent to a model, because the program made it itself."""
        running = self._running.pop(key, None)
        if running is not None:
            self._end(running, running.text, failed=running.failed is not None)

    def _refuse(self, asked: Sequence[Any], told: Sequence[Any]) -> None:
        by_id = {call.get("id"): call.get("function") or {} for call in asked}
        for message in told:
            function = by_id.get(message.tool_call_id, {})
            arguments = _text(function.get("arguments") or "{}")
            span = self.begin_tool(str(function.get("name")), message.tool_call_id, arguments)
            self.end(span, error=_text(message.content))


def _arguments(call: Any) -> str:
    return to_json(call.arguments or {})


def _text(content: Any) -> str:
    return content if isinstance(content, str) else str(content)
