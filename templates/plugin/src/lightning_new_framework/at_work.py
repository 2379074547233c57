"""Agents and tools at work: their spans, and their names for the wire."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from lightning_new_framework.example import Agent
from lightning_spans import spans as names
from lightning_spans.following import Following
from lightning_spans.patches import Undo, replace

if TYPE_CHECKING:
    from lightning_spans.recorder import Recorder

PLUGIN: Final = "lightning_new_framework"
FRAMEWORK: Final = "new-framework"


def bind(recorder: Recorder) -> Callable[[], None]:
    """Follow every agent and tool, until the callable that is given back is called."""
    at_work = AtWork(recorder, PLUGIN, FRAMEWORK)
    undo = Undo()
    undo.add(at_work.stop)
    undo.add(replace(Agent, "run", at_work.wrap_run))
    undo.add(replace(Agent, "stream", at_work.wrap_stream))
    undo.add(replace(Agent, "call_tool", at_work.wrap_call_tool))
    return undo


class AtWork(Following):
    """Begins and ends our spans with the framework's agents and tools.

    What is entered here must be the current context when the model's HTTP request is made: wrap what runs in the task
    and thread of the work itself, not a listener that is called in a thread of its own.
    """

    def wrap_run(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """An agent works, from its prompt to its answer."""

        async def run(agent: Any, *args: Any, **kwargs: Any) -> Any:
            with self.inside(self.begin_agent(agent.name)):
                return await original(agent, *args, **kwargs)

        return run

    def wrap_stream(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """The same, as a stream: what its reader does between two pieces is not the agent's."""

        def stream(agent: Any, *args: Any, **kwargs: Any) -> Any:
            pieces = original(agent, *args, **kwargs)
            return self.steps(self.begin_agent(agent.name), pieces) if self.live else pieces

        return stream

    def wrap_call_tool(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """An agent calls a tool."""

        async def call_tool(agent: Any, name: str, arguments: str, call_id: str) -> Any:
            span = self.begin_tool(name, call_id, arguments)
            with self.inside(span):
                answer = await original(agent, name, arguments, call_id)
                self.end(span, attributes={names.TOOL_RESULT: answer})
                return answer

        return call_tool
