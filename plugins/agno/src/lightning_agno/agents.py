"""Agents, teams and workflows: their spans, and the agents' names for the model calls that they make.

A team's leader asks a model of its own: a team is an agent, and its members are agents inside of it.
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
from lightning_spans.record.context import entered
from lightning_spans.record.instrument.patches import replace
from lightning_spans.record.instrument.tracker import Tracker
from lightning_spans.record.replay import tool_around
from lightning_spans.schema import spans as names

try:
    from agno.workflow import Workflow
except ImportError:  # version 2 wants fastapi for them
    Workflow = None

if TYPE_CHECKING:
    from lightning_spans.hooks import OpenSpan, Recorder

# The event of a stream that says that a run failed, and what names whose run it is.
_FAILED: Final = {RunEvent.run_error.value: "agent_id", TeamRunEvent.run_error.value: "team_id"}


def bind(recorder: Recorder) -> Iterator[Callable[[], None]]:
    """Follow every agent, team and workflow, until what is yielded is called."""
    agents = AgnoAgents(recorder, FRAMEWORK)
    yield agents.stop
    for owner, name in ways():
        yield replace(owner, name, agents.wrap_arun if name.startswith("a") else agents.wrap_run)


def ways() -> Iterator[tuple[type, str]]:
    """Return the methods by which agents, teams and workflows are run or go on: each may give a stream."""
    for owner in (Agent, Team, Workflow):
        for name in ("run", "arun", "continue_run", "acontinue_run"):
            if owner is not None and name in vars(owner):  # teams go on since 2.5, workflows since 2.6
                yield owner, name


class AgnoAgents(Tracker):
    """Begins and ends our spans with the runs of agents, teams and workflows."""

    def wrap_run(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """One of them runs; a stream works when it is read."""

        def run(agent: Any, *args: Any, **kwargs: Any) -> Any:
            span = self._begin(agent)
            if span is None:
                return original(agent, *args, **kwargs)
            try:
                with entered(span.context):
                    output = original(agent, *args, **kwargs)
            except BaseException as error:
                self.end(span, error=error)
                raise
            if isinstance(output, Generator):
                return self.iterate(span, self._heard(agent, span, output))
            self.end(span, error=failure(output))
            return output

        return run

    def wrap_arun(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """The same, to be awaited or read in an event loop."""

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
        """End the span of a run that says that it failed; a team's stream has the events of its members too."""
        whose = _FAILED.get(getattr(event, "event", None) or "")
        if whose is not None and getattr(event, whose, None) == agent.id:
            self.end(span, error=str(event.content or "the run failed"))


def failure(output: Any) -> str | None:
    """Return what a run that failed says; since 2.3 errors are told and not raised. None where it did not fail."""
    if getattr(output, "status", None) is not RunStatus.error:
        return None
    return str(getattr(output, "content", None) or "the run failed")
