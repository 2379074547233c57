"""Agent spans: record which Semantic Kernel agent makes each model call."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator
from typing import TYPE_CHECKING, Any

from semantic_kernel.agents import Agent

from lightning_semantic_kernel import FRAMEWORK
from lightning_spans.record.instrument.patches import replace_in_subclasses
from lightning_spans.record.instrument.tracker import Tracker
from lightning_spans.record.recorder import current_span

if TYPE_CHECKING:
    from lightning_spans.hooks import OpenSpan, Recorder


def bind(recorder: Recorder) -> Iterator[Callable[[], None]]:
    """Patch Semantic Kernel to record every agent; what is yielded removes each patch."""
    agents = KernelAgents(recorder, FRAMEWORK)
    yield agents.stop
    yield replace_in_subclasses(Agent, "get_response", agents.wrap_get_response)
    for name in ("invoke", "invoke_stream"):
        yield replace_in_subclasses(Agent, name, agents.wrap_invoke)


class KernelAgents(Tracker):
    """Starts and ends agent spans around the runs of Semantic Kernel's agents."""

    def __init__(self, recorder: Recorder, framework: str) -> None:
        super().__init__(recorder, framework)
        self._at_work: dict[str, Any] = {}  # running agents, by the id of their span

    def wrap_get_response(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap an agent's run, from its messages to its answer."""

        async def get_response(agent: Any, *args: Any, **kwargs: Any) -> Any:
            span = self._begin(agent)
            try:
                with self.inside(span):
                    return await original(agent, *args, **kwargs)
            finally:
                self._forget(span)

        return get_response

    def wrap_invoke(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap an agent's run, message by message or part by part."""

        def invoke(agent: Any, *args: Any, **kwargs: Any) -> Any:
            items = original(agent, *args, **kwargs)
            return self._read(agent, items) if self.live and isinstance(items, AsyncGenerator) else items

        return invoke

    async def _read(self, agent: Any, items: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
        span = self._begin(agent)
        inner = self.steps(span, items)
        try:
            async for item in inner:
                yield item
        finally:
            await inner.aclose()
            self._forget(span)

    def _begin(self, agent: Any) -> OpenSpan | None:
        """Begin an agent's span; None if it has one, because its method calls its parent class's."""
        with self.guard():
            around = current_span()
            if around is not None and self._at_work.get(around.span_id) is agent:
                return None
            named = "name" in agent.model_fields_set  # Semantic Kernel gives unnamed agents a random name
            span = self.begin_agent(agent.name if named else type(agent).__name__, by_default=not named)
            if span is not None:
                self._at_work[span.span_id] = agent
            return span
        return None

    def _forget(self, span: OpenSpan | None) -> None:
        if span is not None:
            self._at_work.pop(span.span_id, None)
