"""Tool calls that models ask for: carried out, or refused."""

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
from lightning_spans.record.replay import Given, agiven_to, keep_whole, tool_around
from lightning_spans.schema import spans as names
from lightning_strands import FRAMEWORK

if TYPE_CHECKING:
    from lightning_spans.hooks import OpenSpan, Recorder


_HANDOFF: Final = "handoff_to_agent"  # what it does is the swarm's own, and is done in a replay too


def bind(recorder: Recorder) -> Iterator[Callable[[], None]]:
    """Follow every tool call, until what is yielded is called."""
    tools = StrandsTools(recorder, FRAMEWORK)
    yield tools.stop
    yield replace(ToolExecutor, "_stream", tools.wrap_stream)
    yield replace_in_subclasses(AgentTool, "stream", tools.wrap_own_code)


class StrandsTools(Tracker):
    """Begins and ends the spans of tools."""

    def wrap_stream(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A tool is carried out for an agent, or there is none of that name; the last event is its result."""

        def stream(agent: Any, tool_use: Any, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
            events: AsyncGenerator[Any, None] = original(agent, tool_use, *args, **kwargs)
            span = self.begin_tool(tool_use["name"], tool_use.get("toolUseId"), to_json(_input(tool_use)))
            if span is not None and span.name == _HANDOFF:
                with self.guard():
                    span.set(**{names.HANDOFF: (_input(tool_use) or {}).get("agent_name")})
            return events if span is None else self._read(span, events)

        return stream

    def wrap_own_code(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A tool is called, in a replay only where the record does not have what it gave; its last event is that."""

        async def stream(tool: Any, tool_use: Any, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
            span = tool_around() if self.live and tool.tool_name != _HANDOFF else None
            given = None if span is None else await agiven_to(span)
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
        if result is None:  # it waits for somebody
            return
        text = "".join(_text(part) for part in result.get("content", ()))
        failed = result.get("status") == "error"
        if failed:  # nobody of that name goes on
            span.attributes.pop(names.HANDOFF, None)
        given = getattr(span, "given", None)
        error = (given.error if given is not None else getattr(event, "exception", None) or text) if failed else None
        self.end(span, error=error, attributes={names.TOOL_RESULT: text})


def _result_of(given: Given) -> dict[str, Any]:
    """Return what a tool gave in the record, as Strands has it."""
    whole = given.whole()
    if isinstance(whole.value, dict):
        return whole.value
    text = given.result or given.error
    return {"status": "error" if given.failed else "success", "content": [{"text": text}]}


def _input(tool_use: Mapping[str, Any]) -> Any:
    """Return the arguments that the model gave; Strands puts the agent into those of calls that a program makes."""
    given = tool_use.get("input")
    return {k: v for k, v in given.items() if k != "agent"} if isinstance(given, Mapping) else given


def _text(part: Mapping[str, Any]) -> str:
    if "text" in part:
        return str(part["text"])
    return to_json(part.get("json", part))
