"""Tool spans, also for tool calls that Strands rejects."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from strands.tools.executors._executor import ToolExecutor
from strands.types._events import ToolResultEvent
from strands.types.tools import AgentTool

from lightning_openai.json_text import to_json
from lightning_spans.record.context import entered_steps
from lightning_spans.record.instrument.patches import replace, replace_in_subclasses
from lightning_spans.record.instrument.tracker import Tracker
from lightning_spans.record.replay import RecordedOutcome, aoutcome_for, keep_whole, tool_around
from lightning_spans.schema import spans as names
from lightning_strands import FRAMEWORK

if TYPE_CHECKING:
    from lightning_spans.hooks import OpenSpan, Recorder


_HANDOFF: Final = "handoff_to_agent"  # this tool changes the swarm itself, so it also runs in a replay


def bind(recorder: Recorder) -> Iterator[Callable[[], None]]:
    """Patch Strands to record every tool call; what is yielded removes each patch."""
    tools = StrandsTools(recorder, FRAMEWORK)
    yield tools.stop
    yield replace(ToolExecutor, "_stream", tools.wrap_stream)
    yield replace_in_subclasses(AgentTool, "stream", tools.wrap_own_code)


class StrandsTools(Tracker):
    """Starts and ends tool spans around Strands' tool calls."""

    def wrap_stream(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap an agent's tool call, including unknown tools. The last event is the result."""

        def stream(agent: Any, tool_use: Any, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
            events: AsyncGenerator[Any, None] = original(agent, tool_use, *args, **kwargs)
            span = self.begin_tool(tool_use["name"], tool_use.get("toolUseId"), to_json(_input(tool_use)))
            if span is not None and span.name == _HANDOFF:
                with self.guard():
                    span.set(**{names.HANDOFF: (_input(tool_use) or {}).get("agent_name")})
            return events if span is None else self._read(span, events)

        return stream

    def wrap_own_code(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a tool's own code. In a replay it runs only if there is no recorded result.

        The last event is the result.
        """

        async def stream(tool: Any, tool_use: Any, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
            span = tool_around() if self.live and tool.tool_name != _HANDOFF else None
            given = None if span is None else await aoutcome_for(span)
            if given is not None:
                yield ToolResultEvent({**_result_of(given), "toolUseId": tool_use["toolUseId"]})
                return
            last: Any = None
            async for event in original(tool, tool_use, *args, **kwargs):
                last = event
                yield event
            if span is not None:
                keep_whole(span, getattr(last, "tool_result", last))

        return stream

    async def _read(self, span: OpenSpan, events: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
        last: Any = None
        inner = entered_steps(span.context, events)
        with self.working(span):
            try:
                async for event in inner:
                    last = event
                    yield event
            finally:
                await inner.aclose()
            with self.guard(span):
                self._end_with(span, last)

    def _end_with(self, span: OpenSpan, event: Any) -> None:
        result = getattr(event, "tool_result", None)
        if result is None:  # it waits for a person or an event
            return
        text = "".join(_text(part) for part in result.get("content", ()))
        failed = result.get("status") == "error"
        if failed:  # no agent of that name
            span.attributes.pop(names.HANDOFF, None)
        given = getattr(span, "given", None)
        error = (given.error if given is not None else getattr(event, "exception", None) or text) if failed else None
        self.end(span, error=error, attributes={names.TOOL_RESULT: text})


def _result_of(given: RecordedOutcome) -> dict[str, Any]:
    """Return a recorded result in Strands' format."""
    whole = given.whole()
    if isinstance(whole.value, dict):
        return whole.value
    text = given.result or given.error
    return {"status": "error" if given.failed else "success", "content": [{"text": text}]}


def _input(tool_use: Mapping[str, Any]) -> Any:
    """Return the model's arguments. For a program's own calls, Strands adds the agent to them."""
    given = tool_use.get("input")
    return {k: v for k, v in given.items() if k != "agent"} if isinstance(given, Mapping) else given


def _text(part: Mapping[str, Any]) -> str:
    if "text" in part:
        return str(part["text"])
    return to_json(part.get("json", part))
