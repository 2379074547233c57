"""Agent spans: record which ADK agent makes each model call."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator
from typing import TYPE_CHECKING, Any

from google.adk.agents import BaseAgent
from google.adk.runners import Runner

from lightning_google_adk import FRAMEWORK
from lightning_spans.record.instrument.patches import replace
from lightning_spans.record.instrument.tracker import Tracker
from lightning_spans.record.recorder import current_span
from lightning_spans.schema import spans as names

if TYPE_CHECKING:
    from lightning_spans.hooks import Recorder


def bind(recorder: Recorder) -> Iterator[Callable[[], None]]:
    """Patch ADK to record every agent; what is yielded removes each patch."""
    agents = AdkAgents(recorder, FRAMEWORK)
    yield agents.stop
    for way in ("run_async", "run_live"):
        yield replace(BaseAgent, way, agents.wrap_run)
        yield replace(Runner, way, agents.wrap_runner)


class AdkAgents(Tracker):
    """Starts and ends spans around the runs of agents: LLM agents, workflows, and the user's own classes."""

    def wrap_run(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap an agent's run: by a runner, within another agent, or after a transfer. Its events are a generator."""

        def run(agent: Any, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
            events: AsyncGenerator[Any, None] = original(agent, *args, **kwargs)
            return self.steps(self.begin_agent(agent.name), events) if self.live else events

        return run

    def wrap_runner(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a runner. Since ADK 2 it runs agents one after the other when they transfer; all belong to one trace."""

        def run(runner: Any, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
            events: AsyncGenerator[Any, None] = original(runner, *args, **kwargs)
            if not self.live or current_span() is not None:
                return events
            return self.steps(self.begin(names.INVOKE_WORKFLOW, runner.app_name), events)

        return run
