"""Agents and workflows: their spans, and the agents' names for the model calls that they make."""

from __future__ import annotations

import re
import weakref
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final

from agent_framework import Agent, RawAgent, ResponseStream, Workflow

from lightning_agent_framework import FRAMEWORK
from lightning_spans.record.context import entered
from lightning_spans.record.instrument.patches import replace
from lightning_spans.record.instrument.tracker import Tracker
from lightning_spans.schema import spans as names

if TYPE_CHECKING:
    from lightning_spans.hooks import OpenSpan, Recorder

_RANDOM: Final = re.compile(r"-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$")  # at the end of a name that nobody gave


def bind(recorder: Recorder) -> Iterator[Callable[[], None]]:
    """Follow every agent and workflow, until what is yielded is called."""
    agents = AgentFrameworkAgents(recorder, FRAMEWORK)
    yield agents.stop
    yield replace(Agent, "run", agents.wrap_run)
    yield replace(RawAgent, "run", agents.wrap_raw_run)
    yield replace(Workflow, "run", agents.wrap_workflow)


class AgentFrameworkAgents(Tracker):
    """Begins and ends our spans with the framework's agents and workflows."""

    def wrap_run(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """An agent works, from its prompt to its answer: an awaitable, or a stream that works when it is read."""

        def run(agent: Any, *args: Any, **kwargs: Any) -> Any:
            return self._follow(lambda: self._begin(agent), original(agent, *args, **kwargs))

        return run

    def wrap_raw_run(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """The same of an agent without middleware; an `Agent` comes by here inside of its own run."""

        def run(agent: Any, *args: Any, **kwargs: Any) -> Any:
            work = original(agent, *args, **kwargs)
            return work if isinstance(agent, Agent) else self._follow(lambda: self._begin(agent), work)

        return run

    def wrap_workflow(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A workflow runs: agents in sequence, at the same time, or handing over to each other."""

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
        """Make each piece of a stream under its span, which ends with the stream, or when nobody holds that."""
        if span is not None:
            stream._pull_context_manager_factories.append(lambda: _Pull(self, span))
            stream._cleanup_hooks.append(lambda: self.end(span))
            weakref.finalize(stream, self.end, span, attributes={names.ABANDONED: True})
        return stream


class _Pull(AbstractContextManager[None]):
    """One piece of a stream is made."""

    def __init__(self, tracker: Tracker, span: OpenSpan) -> None:
        self._tracker, self._span, self._entered = tracker, span, entered(span.context)

    def __enter__(self) -> None:
        self._entered.__enter__()

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        self._entered.__exit__(kind, error, traceback)
        if error is not None and not isinstance(error, StopAsyncIteration):
            self._tracker.end(self._span, error=error)
