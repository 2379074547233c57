"""Agents: their spans, and their names for the model calls that they make."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from lightning_new_framework import FRAMEWORK
from lightning_new_framework.example import Agent
from lightning_spans.record.instrument.patches import replace
from lightning_spans.record.instrument.tracker import Tracker

if TYPE_CHECKING:
    from lightning_spans.hooks import Recorder


def bind(recorder: Recorder) -> Iterator[Callable[[], None]]:
    """Follow every agent, until what is yielded is called."""
    agents = NewFrameworkAgents(recorder, FRAMEWORK)
    yield agents.stop
    yield replace(Agent, "run", agents.wrap_run)
    yield replace(Agent, "stream", agents.wrap_stream)


class NewFrameworkAgents(Tracker):
    """Begins and ends our spans with the framework's agents.

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
