"""Tool spans: the arguments the model requested and the result it got."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ag2.events import DataInput, TextInput, ToolErrorEvent, ToolResultEvent
from ag2.tools import ToolResult, executor
from ag2.tools.final import FunctionTool

from lightning_ag2 import FRAMEWORK
from lightning_openai.json_text import to_json
from lightning_spans.record.instrument.patches import replace
from lightning_spans.record.instrument.tracker import Tracker
from lightning_spans.record.replay import RecordedOutcome, arun_or_replay, keep_whole
from lightning_spans.record.returned import error_of
from lightning_spans.schema import spans as names

if TYPE_CHECKING:
    from lightning_spans.hooks import OpenSpan, Recorder


def bind(recorder: Recorder) -> Iterator[Callable[[], None]]:
    """Patch AG2 to record every tool call; what is yielded removes each patch."""
    tools = Ag2Tools(recorder, FRAMEWORK)
    yield tools.stop
    yield replace(executor, "_execute_call", tools.wrap_execute)
    yield replace(FunctionTool, "__call__", tools.wrap_own_code)


class Ag2Tools(Tracker):
    """Starts and ends tool spans around AG2's tool calls."""

    def wrap_execute(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a tool call of a model. The tool may run, be unknown, or be left to the program's client."""

        async def execute(context: Any, call: Any) -> Any:
            span = self.begin_tool(call.name, call.id, call.arguments)
            with self.inside(span):
                outcome = await original(context, call)
                with self.guard(span):
                    self._end(span, outcome)
                return outcome

        return execute

    def _end(self, span: OpenSpan | None, outcome: Any) -> None:
        if not isinstance(outcome, ToolResultEvent):  # the program runs it later
            return
        error = outcome.error if isinstance(outcome, ToolErrorEvent) else None
        self.end(span, error=error, attributes={names.TOOL_RESULT: _text(outcome.result)})

    def wrap_own_code(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the tool's own code. AG2 turns its errors into events whose text has the traceback."""

        async def call(tool: Any, event: Any, context: Any) -> Any:
            return await arun_or_replay(
                lambda: original(tool, event, context), lambda given: _outcome(event, given), keep=_keep
            )

        return call


def _text(result: ToolResult) -> str:
    """Return a tool's result as the text that the model gets."""
    return "".join(map(_part, result.parts))


def _part(part: Any) -> str:
    if isinstance(part, TextInput):
        return str(part.content)
    return to_json(part.data) if isinstance(part, DataInput) else repr(part)


def _keep(span: OpenSpan, outcome: Any) -> None:
    """Record a tool's returned value, unless its text already says everything, as for errors."""
    span.attributes.pop(names.TOOL_RETURNED, None)
    if isinstance(outcome, ToolResultEvent) and not isinstance(outcome, ToolErrorEvent):
        result = outcome.result
        values = [part.data if isinstance(part, DataInput) else getattr(part, "content", part) for part in result.parts]
        keep_whole(span, {"parts": values, "final": result.final})


def _outcome(call: Any, given: RecordedOutcome) -> Any:
    """Return the event for a recorded outcome of a tool."""
    if given.failed:
        error = error_of(given.error_type, given.error)
        return ToolErrorEvent(parent_id=call.id, name=call.name, error=error, result=ToolResult(given.result))
    whole = given.whole().value
    kept: dict[str, Any] = whole if isinstance(whole, dict) else {"parts": [given.result], "final": False}
    return ToolResultEvent.from_call(call, ToolResult(*kept["parts"], final=kept["final"]))
