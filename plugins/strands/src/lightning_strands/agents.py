"""Agent spans: record which Strands agent, graph or swarm makes each model call."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

from strands import Agent
from strands.multiagent import Swarm
from strands.multiagent.graph import Graph

from lightning_spans.record.instrument.patches import replace
from lightning_spans.record.instrument.tracker import Tracker
from lightning_spans.schema import spans as names
from lightning_strands import FRAMEWORK

if TYPE_CHECKING:
    from lightning_spans.hooks import OpenSpan, Recorder

UNNAMED: Final = "Strands Agents"  # Strands' name for an unnamed agent


def bind(recorder: Recorder) -> Iterator[Callable[[], None]]:
    """Patch Strands to record every agent, graph and swarm; what is yielded removes each patch."""
    agents = StrandsAgents(recorder, FRAMEWORK)
    yield agents.stop
    yield replace(Agent, "stream_async", agents.wrap_stream)
    yield replace(Agent, "structured_output_async", agents.wrap_structured_output)
    for team in (Graph, Swarm):
        yield replace(team, way_of(team), agents.wrap_team_stream if streams(team) else agents.wrap_team)


def streams(team: Any) -> bool:
    """Whether a graph or swarm runs as a stream, since 1.14."""
    return "stream_async" in vars(team)


def way_of(team: Any) -> str:
    """Return the method that every way to run a graph or swarm uses."""
    return "stream_async" if streams(team) else "invoke_async"


class StrandsAgents(Tracker):
    """Starts and ends spans around runs of agents, graphs and swarms."""

    def _begin(self, agent: Any) -> OpenSpan | None:
        return self.begin_agent(agent.name, by_default=agent.name == UNNAMED)

    def wrap_stream(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap an agent's run. Every way to run one, streamed or not, uses this method."""

        def stream(agent: Any, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
            events: AsyncGenerator[Any, None] = original(agent, *args, **kwargs)
            return self.steps(self._begin(agent), events) if self.live else events

        return stream

    def wrap_structured_output(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap an agent's structured answer, which is a call of its own."""

        async def answer(agent: Any, *args: Any, **kwargs: Any) -> Any:
            with self.inside(self._begin(agent)):
                return await original(agent, *args, **kwargs)

        return answer

    def wrap_team_stream(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a streamed run of a graph or swarm."""

        def stream(team: Any, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
            events: AsyncGenerator[Any, None] = original(team, *args, **kwargs)
            return self.steps(self.begin(names.INVOKE_WORKFLOW, type(team).__name__), events) if self.live else events

        return stream

    def wrap_team(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a run of a graph or swarm in versions without streaming."""

        async def invoke(team: Any, *args: Any, **kwargs: Any) -> Any:
            with self.inside(self.begin(names.INVOKE_WORKFLOW, type(team).__name__)):
                return await original(team, *args, **kwargs)

        return invoke
