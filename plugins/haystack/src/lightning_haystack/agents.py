"""Agent and pipeline spans: record which agent makes each model call.

Haystack's agents have no names of their own. An agent is named after its component in the pipeline, or after the tool
as which another agent calls it. Any other component counts as an agent from its first model call.
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
    """Patch Haystack to record every agent, pipeline and component; what is yielded removes each patch."""
    agents = HaystackAgents(recorder, FRAMEWORK)
    yield agents.stop
    yield replace(Agent, "run", agents.wrap_run)
    yield replace(Agent, "run_async", agents.wrap_run_async)
    yield replace(PipelineBase, "_create_component_span", agents.wrap_component)
    yield replace(Pipeline, "run", agents.wrap_pipeline)
    yield replace(async_pipeline(), "run_async_generator", agents.wrap_async_pipeline)


def async_pipeline() -> Any:
    """Return the class of asynchronous pipelines, which is separate before Haystack 3."""
    return Pipeline if "run_async_generator" in vars(Pipeline) else haystack.AsyncPipeline


class HaystackAgents(Tracker):
    """Starts and ends spans around agents, pipelines, and components that call models."""

    def wrap_run(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a synchronous run of an agent."""

        def run(agent: Any, *args: Any, **kwargs: Any) -> Any:
            with self.inside(self._begin(agent)):
                return original(agent, *args, **kwargs)

        return run

    def wrap_run_async(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap an asynchronous run of an agent."""

        async def run_async(agent: Any, *args: Any, **kwargs: Any) -> Any:
            with self.inside(self._begin(agent)):
                return await original(agent, *args, **kwargs)

        return run_async

    def _begin(self, agent: Any) -> OpenSpan | None:
        tool = tool_of(agent)
        name = getattr(agent, "__component_name__", None) or (None if tool is None else tool.name)
        return self.begin_agent(str(name or type(agent).__name__), by_default=name is None)

    def wrap_component(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the context in which a pipeline runs a component."""

        def create(component_name: str, instance: Any, *args: Any, **kwargs: Any) -> Any:
            theirs = original(component_name, instance, *args, **kwargs)
            # Before Haystack 3, an agent runs its generator and its tools as components without names.
            own = getattr(instance, "__component_name__", None) == component_name
            if not self.live or not own or isinstance(instance, Agent):
                return theirs
            return self._component(component_name, instance, theirs)

        return create

    @contextmanager
    def _component(self, name: str, instance: Any, theirs: AbstractContextManager[Any]) -> Iterator[Any]:
        pipeline = getattr(instance, "pipeline", None)
        # a pipeline as a component: the agents within it are listed under its name
        if isinstance(pipeline, PipelineBase) and _asks_models(pipeline):
            with theirs as span, self.inside(self.begin_agent(name)):
                yield span
            return
        with theirs as span, following(self, name):
            yield span

    def wrap_pipeline(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a synchronous run of a pipeline."""

        def run(pipeline: Any, *args: Any, **kwargs: Any) -> Any:
            with self.inside(self.begin(names.INVOKE_WORKFLOW, type(pipeline).__name__)):
                return original(pipeline, *args, **kwargs)

        return run

    def wrap_async_pipeline(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap an asynchronous or streamed run of a pipeline. All of them use this method."""

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
