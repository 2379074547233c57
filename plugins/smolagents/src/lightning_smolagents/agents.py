"""Agent spans: record which smolagents agent makes each model call."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any

from smolagents.agents import MultiStepAgent

from lightning_smolagents import FRAMEWORK
from lightning_spans.record.instrument.patches import replace
from lightning_spans.record.instrument.tracker import Tracker

if TYPE_CHECKING:
    from lightning_spans.hooks import Recorder


def bind(recorder: Recorder) -> Iterator[Callable[[], None]]:
    """Patch smolagents to record every agent; what is yielded removes each patch."""
    agents = SmolAgents(recorder, FRAMEWORK)
    yield agents.stop
    yield replace(MultiStepAgent, "run", agents.wrap_run)


def name_of(agent: Any) -> str:
    """Return an agent's name. Only managed agents must have one."""
    return agent.name or type(agent).__name__


class SmolAgents(Tracker):
    """Starts and ends spans around agents' runs."""

    def wrap_run(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap an agent's run. A stream does the work while it is read."""

        def run(agent: Any, *args: Any, **kwargs: Any) -> Any:
            span = self.begin_agent(name_of(agent), by_default=not agent.name) if self.live else None
            if span is None:
                return original(agent, *args, **kwargs)
            with self.start_inside(span):
                output = original(agent, *args, **kwargs)
            if isinstance(output, Generator):
                return self.iterate(span, output)
            self.end(span)
            return output

        return run
