"""Agent spans: record which ADK agent makes each model call."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from types import ModuleType
from typing import TYPE_CHECKING, Any

from google.adk.agents import BaseAgent
from google.adk.runners import Runner

from lightning_google_adk import FRAMEWORK
from lightning_spans.record.instrument.imports import when_imported
from lightning_spans.record.instrument.patches import Undo, replace
from lightning_spans.record.instrument.tracker import Tracker
from lightning_spans.record.recorder import current_span
from lightning_spans.schema import spans as names

if TYPE_CHECKING:
    from lightning_spans.hooks import OpenSpan, Recorder


def bind(recorder: Recorder) -> Iterator[Callable[[], None]]:
    """Patch ADK to record every agent; what is yielded removes each patch."""
    agents = AdkAgents(recorder, FRAMEWORK)
    yield agents.stop
    for way in ("run_async", "run_live"):
        yield replace(BaseAgent, way, agents.wrap_run)
        yield replace(Runner, way, agents.wrap_runner)
    yield when_imported("google.adk.workflow._workflow", agents.follow_workflows)


class AdkAgents(Tracker):
    """Starts and ends spans around the runs of agents: LLM agents, workflows, and the user's own classes."""

    def wrap_run(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap an agent's run: by a runner, within another agent, or after a transfer. Its events are a generator."""

        def run(agent: Any, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
            events: AsyncGenerator[Any, None] = original(agent, *args, **kwargs)
            return self.steps(self.begin_agent(agent.name), events) if self.live else events

        return run

    def follow_workflows(self, workflow: ModuleType) -> Undo:
        """Record `Workflow`, a graph of nodes since ADK 2, like `SequentialAgent`; return what undoes it.

        It is no `BaseAgent`. A node that is a workflow runs within the step of the outer one.
        """
        undo = Undo()
        undo.add(replace(workflow.Workflow, "_run_impl", self.wrap_workflow))
        return undo

    def wrap_workflow(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a workflow's run. ADK enters the context that it keeps for the workflow around each of its agents."""

        def run(workflow: Any, *, ctx: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
            events: AsyncGenerator[Any, None] = original(workflow, ctx=ctx, **kwargs)
            span = self.begin_agent(workflow.name)
            if span is None:
                return events
            with self.guard(span):
                known = ctx.telemetry_context
                ctx._telemetry_context = dataclasses.replace(known, otel_context=span.context)
            return self.steps(span, self._with_error(span, ctx, events))

        return run

    async def _with_error(
        self, span: OpenSpan, ctx: Any, events: AsyncGenerator[Any, None]
    ) -> AsyncGenerator[Any, None]:
        """Return the events of a workflow. One whose node failed raises nothing: its context has the error."""
        async with aclosing(events):
            async for event in events:
                yield event
        with self.guard(span):
            if ctx.error is not None:
                self.end(span, error=ctx.error)

    def wrap_runner(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a runner. Since ADK 2 it runs agents one after the other when they transfer; all belong to one trace."""

        def run(runner: Any, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
            events: AsyncGenerator[Any, None] = original(runner, *args, **kwargs)
            if not self.live or current_span() is not None:
                return events
            return self.steps(self.begin(names.INVOKE_WORKFLOW, runner.app_name), events)

        return run
