"""Tool spans."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from lightning_new_framework import FRAMEWORK
from lightning_new_framework.example import Agent
from lightning_spans.record.instrument.patches import replace
from lightning_spans.record.instrument.tracker import Tracker
from lightning_spans.record.replay import arun_or_replay
from lightning_spans.schema import spans as names

if TYPE_CHECKING:
    from lightning_spans.hooks import Recorder


def bind(recorder: Recorder) -> Iterator[Callable[[], None]]:
    """Patch the framework to record every tool call; what is yielded removes each patch."""
    tools = NewFrameworkTools(recorder, FRAMEWORK)
    yield tools.stop
    yield replace(Agent, "call_tool", tools.wrap_call_tool)


class NewFrameworkTools(Tracker):
    """Begins and ends tool spans around the framework's tool calls."""

    def wrap_call_tool(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a tool call of an agent."""

        async def call_tool(agent: Any, name: str, arguments: str, call_id: str) -> Any:
            span = self.begin_tool(name, call_id, arguments)
            with self.inside(span):
                answer = await arun_or_replay(lambda: original(agent, name, arguments, call_id))
                self.end(span, attributes={names.TOOL_RESULT: answer})
                return answer

        return call_tool
