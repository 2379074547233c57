"""Agent spans: record which agent, team or workflow makes each model call.

A team's leader calls its own model. A team is therefore recorded as an agent that contains its members.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any, Final

from agno.agent import Agent
from agno.run.agent import RunEvent
from agno.run.base import RunStatus
from agno.run.team import TeamRunEvent
from agno.team import Team

from lightning_agno import FRAMEWORK
from lightning_agno.tools import DELEGATE
from lightning_spans.record.instrument.patches import replace
from lightning_spans.record.instrument.tracker import Tracker
from lightning_spans.record.replay import tool_around
from lightning_spans.schema import spans as names

try:
    from agno.workflow import Workflow
except ImportError:  # version 2 needs fastapi for workflows
    Workflow = None

if TYPE_CHECKING:
    from lightning_spans.hooks import OpenSpan, Recorder

# The stream event that reports a failed run, and the attribute that names the failed agent or team.
_FAILED: Final = {RunEvent.run_error.value: "agent_id", TeamRunEvent.run_error.value: "team_id"}


def bind(recorder: Recorder) -> Iterator[Callable[[], None]]:
    """Patch Agno to record every agent, team and workflow; what is yielded removes each patch."""
    agents = AgnoAgents(recorder, FRAMEWORK)
    yield agents.stop
    for owner, name in ways():
        yield replace(owner, name, agents.wrap_arun if name.startswith("a") else agents.wrap_run)


def ways() -> Iterator[tuple[type, str]]:
    """Return the methods that start or continue a run. Each may return a stream."""
    for owner in (Agent, Team, Workflow):
        for name in ("run", "arun", "continue_run", "acontinue_run"):
            if owner is not None and name in vars(owner):  # teams can be continued since 2.5, workflows since 2.6
                yield owner, name


class AgnoAgents(Tracker):
    """Starts and ends spans around runs of agents, teams and workflows."""

    def wrap_run(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a synchronous run. A stream does the work while it is read."""

        def run(agent: Any, *args: Any, **kwargs: Any) -> Any:
            span = self._begin(agent)
            if span is None:
                return original(agent, *args, **kwargs)
            with self.start_inside(span):
                output = original(agent, *args, **kwargs)
            if isinstance(output, Generator):
                return self.iterate(span, self._heard(agent, span, output))
            self.end(span, error=failure(output))
            return output

        return run

    def wrap_arun(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap an asynchronous run, awaited or streamed."""

        def arun(agent: Any, *args: Any, **kwargs: Any) -> Any:
            work = original(agent, *args, **kwargs)
            if not self.live:
                return work
            if isinstance(work, AsyncGenerator):
                span = self._begin(agent)
                return work if span is None else self.steps(span, self._aheard(agent, span, work))
            return self._awaited(agent, work) if inspect.isawaitable(work) else work

        return arun

    async def _awaited(self, agent: Any, work: Awaitable[Any]) -> Any:
        span = self._begin(agent)
        with self.inside(span):
            output = await work
            self.end(span, error=failure(output))
            return output

    def _begin(self, agent: Any) -> OpenSpan | None:
        if Workflow is not None and isinstance(agent, Workflow):
            return self.begin(names.INVOKE_WORKFLOW, agent.name or "Workflow")
        name = agent.name or type(agent).__name__
        if self.live:
            with self.guard():
                around = tool_around()
                if around is not None and around.name == DELEGATE:
                    around.set(**{names.HANDOFF: name})
        return self.begin_agent(name, by_default=not agent.name)

    def _heard(self, agent: Any, span: OpenSpan, events: Generator[Any, None, None]) -> Generator[Any, None, None]:
        try:
            for event in events:
                self._hear(agent, span, event)
                yield event
        finally:
            events.close()

    async def _aheard(self, agent: Any, span: OpenSpan, events: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
        try:
            async for event in events:
                self._hear(agent, span, event)
                yield event
        finally:
            await events.aclose()

    def _hear(self, agent: Any, span: OpenSpan, event: Any) -> None:
        """End the span of a run whose stream reports a failure. A team's stream also contains its members' events."""
        whose = _FAILED.get(getattr(event, "event", None) or "")
        if whose is not None and getattr(event, whose, None) == agent.id:
            self.end(span, error=str(event.content or "the run failed"))


def failure(output: Any) -> str | None:
    """Return the error of a failed run, or None. Since 2.3 Agno returns errors instead of raising them."""
    if getattr(output, "status", None) is not RunStatus.error:
        return None
    return str(getattr(output, "content", None) or "the run failed")
