"""Agent spans: record which Pydantic AI agent makes each model call."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any, Final
from weakref import ref

from pydantic_ai import Agent, CallToolsNode, ModelRequestNode
from pydantic_ai.run import AgentRun

from lightning_pydantic_ai import FRAMEWORK
from lightning_spans.record.context import Steps, attach, current, entered_steps, overlaid, use_context
from lightning_spans.record.instrument.patches import replace
from lightning_spans.record.instrument.tracker import Tracker
from lightning_spans.record.recorder import current_span

if TYPE_CHECKING:
    from opentelemetry.context import Context

    from lightning_spans.hooks import OpenSpan, Recorder

UNNAMED: Final = "agent"  # Pydantic AI's name for an agent whose variable it could not find


def bind(recorder: Recorder) -> Iterator[Callable[[], None]]:
    """Patch Pydantic AI to record every agent; what is yielded removes each patch."""
    agents = PydanticAgents(recorder, FRAMEWORK)
    yield agents.stop
    yield replace(Agent, "iter", agents.wrap_iter)
    yield replace(next(kind for kind in Agent.__mro__ if "_infer_name" in vars(kind)), "_infer_name", agents.wrap_infer)
    for step in ("next", "__anext__"):
        yield replace(AgentRun, step, agents.wrap_step)
    for node in (ModelRequestNode, CallToolsNode):
        yield replace(node, "stream", agents.wrap_stream)


class PydanticAgents(Tracker):
    """Starts and ends spans around agents' runs.

    A run stays entered as long as the caller's block lasts, so that what the caller does there is recorded under the
    agent. The caller may have entered another run since, or be in another task, so each step of a run enters it again.
    """

    def __init__(self, recorder: Recorder, framework: str) -> None:
        super().__init__(recorder, framework)
        self._runs: dict[int, OpenSpan] = {}  # by the id of the run's state, which exists as long as the run
        self._inferred: dict[int, ref[Any]] = {}  # agents that are named after the variable that holds them, by id

    def wrap_infer(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the naming of an agent without a name: it is named after the variable that holds it."""

        def infer_name(agent: Any, *args: Any, **kwargs: Any) -> Any:
            original(agent, *args, **kwargs)
            if agent.name is not None:
                key = id(agent)
                self._inferred[key] = ref(agent, lambda _: self._inferred.pop(key, None))

        return infer_name

    def _is_inferred(self, agent: Any) -> bool:
        known = self._inferred.get(id(agent))
        return known is not None and known() is agent

    def wrap_iter(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap an agent's run. Every way to run one, streamed or not, uses `iter`."""

        def iterate(agent: Any, *args: Any, **kwargs: Any) -> Any:
            run = original(agent, *args, **kwargs)
            return self._running(agent, run) if self.live else run

        return iterate

    @asynccontextmanager
    async def _running(self, agent: Any, run: AbstractAsyncContextManager[Any]) -> AsyncIterator[Any]:
        span = self.begin_agent(agent.name or UNNAMED, by_default=not agent.name or self._is_inferred(agent))
        outer = current()
        with self.working(span):
            if span is not None:
                attach(span.context)
            try:
                async with run as begun:
                    state = _state(begun)
                    if span is not None:
                        self._runs[state] = span
                    try:
                        yield begun
                    finally:
                        self._runs.pop(state, None)
            finally:
                attach(overlaid(outer))  # no token: an abandoned run may end in another context

    def wrap_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a run's step to its next node."""

        async def step(run: Any, *args: Any, **kwargs: Any) -> Any:
            span = self._runs.get(_state(run))
            if span is None or current_span() is span:
                return await original(run, *args, **kwargs)
            with use_context(overlaid(span.context)):
                return await original(run, *args, **kwargs)

        return step

    def wrap_stream(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a node's stream."""

        def stream(node: Any, ctx: Any, *args: Any, **kwargs: Any) -> Any:
            span = self._runs.get(id(getattr(ctx, "state", None)))
            streaming = original(node, ctx, *args, **kwargs)
            return streaming if span is None else _streamed_in(span.context, streaming)

        return stream


def _state(run: Any) -> int:
    return id(getattr(getattr(run, "ctx", None), "state", None))


@asynccontextmanager
async def _streamed_in(context: Context, streaming: AbstractAsyncContextManager[Any]) -> AsyncIterator[Any]:
    """Start, continue and end a stream in `context`, but not what its reader does in between."""
    steps = Steps(context)
    steps.enter()
    try:
        async with streaming as items:
            steps.leave()
            try:  # events are a generator, which runs a tool when the next event is requested
                yield entered_steps(context, items) if isinstance(items, AsyncGenerator) else items
            finally:
                steps.enter()
    finally:
        steps.leave()
