"""Agent and workflow spans: record which agent makes each model call."""

from __future__ import annotations

import re
import weakref
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final

from agent_framework import Agent, RawAgent, ResponseStream, Workflow

from lightning_agent_framework import FRAMEWORK
from lightning_spans.record.context import use_context
from lightning_spans.record.instrument.patches import replace
from lightning_spans.record.instrument.tracker import Tracker
from lightning_spans.schema import spans as names

if TYPE_CHECKING:
    from lightning_spans.hooks import OpenSpan, Recorder

# end of the name that the framework generates for an unnamed agent
_RANDOM: Final = re.compile(r"-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$")


def bind(recorder: Recorder) -> Iterator[Callable[[], None]]:
    """Patch the framework to record every agent and workflow; what is yielded removes each patch."""
    agents = AgentFrameworkAgents(recorder, FRAMEWORK)
    yield agents.stop
    yield replace(Agent, "run", agents.wrap_run)
    yield replace(RawAgent, "run", agents.wrap_raw_run)
    yield replace(Workflow, "run", agents.wrap_workflow)


class AgentFrameworkAgents(Tracker):
    """Starts and ends spans around the framework's agents and workflows."""

    def wrap_run(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a run of an agent. It returns an awaitable, or a stream that does the work while it is read."""

        def run(agent: Any, *args: Any, **kwargs: Any) -> Any:
            return self._follow(lambda: self._begin(agent), original(agent, *args, **kwargs))

        return run

    def wrap_raw_run(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a run of an agent without middleware. An `Agent` also calls this within its own run."""

        def run(agent: Any, *args: Any, **kwargs: Any) -> Any:
            work = original(agent, *args, **kwargs)
            return work if isinstance(agent, Agent) else self._follow(lambda: self._begin(agent), work)

        return run

    def wrap_workflow(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a run of a workflow: agents in sequence, in parallel, or with handoffs."""

        def run(workflow: Any, *args: Any, **kwargs: Any) -> Any:
            name = _RANDOM.sub("", getattr(workflow, "name", None) or type(workflow).__name__)
            return self._follow(lambda: self.begin(names.INVOKE_WORKFLOW, name), original(workflow, *args, **kwargs))

        return run

    def _begin(self, agent: Any) -> OpenSpan | None:
        return self.begin_agent(agent.name or type(agent).__name__, by_default=not agent.name)

    def _follow(self, begin: Callable[[], OpenSpan | None], work: Any) -> Any:
        if not self.live:
            return work
        return self._read(begin(), work) if isinstance(work, ResponseStream) else self._awaited(begin, work)

    async def _awaited(self, begin: Callable[[], OpenSpan | None], work: Awaitable[Any]) -> Any:
        with self.inside(begin()):
            return await work

    def _read(self, span: OpenSpan | None, stream: Any) -> Any:
        """Compute each item of a stream within the span.

        The span ends with the stream, or when it is garbage collected.
        """
        if span is not None:
            stream._pull_context_manager_factories.append(lambda: _Pull(self, span))
            stream._cleanup_hooks.append(lambda: self.end(span))
            weakref.finalize(stream, self.end, span, attributes={names.ABANDONED: True})
        return stream


class _Pull(AbstractContextManager[None]):
    """Computes one item of a stream."""

    def __init__(self, tracker: Tracker, span: OpenSpan) -> None:
        self._tracker, self._span, self._entered = tracker, span, use_context(span.context)

    def __enter__(self) -> None:
        self._entered.__enter__()

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        self._entered.__exit__(kind, error, traceback)
        if error is not None and not isinstance(error, StopAsyncIteration):
            self._tracker.end(self._span, error=error)
