"""Agents and pipelines: their spans, and the agents' names for the model calls that they make.

An agent of Haystack's has no name of its own: it is called as the component that it is in its pipeline, or as the tool
that it is to another agent. Any other component of a pipeline is an agent from its first model call on.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import haystack
from haystack import Pipeline
from haystack.components.agents import Agent
from haystack.core.pipeline.base import PipelineBase

from lightning_haystack import FRAMEWORK
from lightning_haystack.tools import tool_of
from lightning_spans.record.instrument.caller import following
from lightning_spans.record.instrument.patches import replace
from lightning_spans.record.instrument.tracker import Tracker
from lightning_spans.schema import spans as names

if TYPE_CHECKING:
    from lightning_spans.hooks import OpenSpan, Recorder


def bind(recorder: Recorder) -> Iterator[Callable[[], None]]:
    """Follow every agent, pipeline and component, until what is yielded is called."""
    agents = HaystackAgents(recorder, FRAMEWORK)
    yield agents.stop
    yield replace(Agent, "run", agents.wrap_run)
    yield replace(Agent, "run_async", agents.wrap_run_async)
    yield replace(PipelineBase, "_create_component_span", agents.wrap_component)
    yield replace(Pipeline, "run", agents.wrap_pipeline)
    yield replace(async_pipeline(), "run_async_generator", agents.wrap_async_pipeline)


def async_pipeline() -> Any:
    """Return the class of pipelines that can be awaited: one of its own before Haystack 3."""
    return Pipeline if "run_async_generator" in vars(Pipeline) else haystack.AsyncPipeline


class HaystackAgents(Tracker):
    """Begins and ends the spans of agents, of pipelines, and of components that call models."""

    def wrap_run(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """An agent works."""

        def run(agent: Any, *args: Any, **kwargs: Any) -> Any:
            with self.inside(self._begin(agent)):
                return original(agent, *args, **kwargs)

        return run

    def wrap_run_async(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """The same, awaited."""

        async def run_async(agent: Any, *args: Any, **kwargs: Any) -> Any:
            with self.inside(self._begin(agent)):
                return await original(agent, *args, **kwargs)

        return run_async

    def _begin(self, agent: Any) -> OpenSpan | None:
        tool = tool_of(agent)
        name = getattr(agent, "__component_name__", None) or (None if tool is None else tool.name)
        return self.begin_agent(str(name or type(agent).__name__), by_default=name is None)

    def wrap_component(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A component of a pipeline runs inside of what this returns."""

        def create(component_name: str, instance: Any, *args: Any, **kwargs: Any) -> Any:
            theirs = original(component_name, instance, *args, **kwargs)
            # Before Haystack 3, an agent runs its generator and its tools as components that have no name.
            own = getattr(instance, "__component_name__", None) == component_name
            if not self.live or not own or isinstance(instance, Agent):
                return theirs
            return self._component(component_name, instance, theirs)

        return create

    @contextmanager
    def _component(self, name: str, instance: Any, theirs: AbstractContextManager[Any]) -> Iterator[Any]:
        pipeline = getattr(instance, "pipeline", None)
        if isinstance(pipeline, PipelineBase) and _asks_models(pipeline):  # the agents in it stand under its name
            with theirs as span, self.inside(self.begin_agent(name)):
                yield span
            return
        with theirs as span, following(self, name):
            yield span

    def wrap_pipeline(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A pipeline runs."""

        def run(pipeline: Any, *args: Any, **kwargs: Any) -> Any:
            with self.inside(self.begin(names.INVOKE_WORKFLOW, type(pipeline).__name__)):
                return original(pipeline, *args, **kwargs)

        return run

    def wrap_async_pipeline(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A pipeline is awaited or streamed: every way comes by here."""

        def run(pipeline: Any, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
            parts: AsyncGenerator[Any, None] = original(pipeline, *args, **kwargs)
            if not self.live:
                return parts
            return self.steps(self.begin(names.INVOKE_WORKFLOW, type(pipeline).__name__), parts)

        return run


def _asks_models(pipeline: PipelineBase) -> bool:
    return any(
        isinstance(part, Agent)
        or "replies" in part.__haystack_output__._sockets_dict
        or any(name.endswith("chat_generator") for name in vars(part))
        for _, part in pipeline.walk()
    )
