"""Agent spans: record which agent makes each model call."""

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
    """Patch the framework to record every agent; what is yielded removes each patch."""
    agents = NewFrameworkAgents(recorder, FRAMEWORK)
    yield agents.stop
    yield replace(Agent, "run", agents.wrap_run)
    yield replace(Agent, "stream", agents.wrap_stream)


class NewFrameworkAgents(Tracker):
    """Begins and ends agent spans around the runs of the framework's agents.

    The context that is set here must be current when the model's HTTP request is made: wrap code that runs in the task
    and thread of the work itself, not a listener that is called in its own thread.
    """

    def wrap_run(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap an agent's run, from its prompt to its answer."""

        async def run(agent: Any, *args: Any, **kwargs: Any) -> Any:
            with self.inside(self.begin_agent(agent.name)):
                return await original(agent, *args, **kwargs)

        return run

    def wrap_stream(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap an agent's run as a stream. What its reader does between two items is not part of the agent.

        `steps` takes an asynchronous generator. For a synchronous one, call `iterate` instead.
        """

        def stream(agent: Any, *args: Any, **kwargs: Any) -> Any:
            pieces = original(agent, *args, **kwargs)
            return self.steps(self.begin_agent(agent.name), pieces) if self.live else pieces

        return stream
