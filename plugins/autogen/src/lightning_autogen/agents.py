"""Agents and teams at work: their spans, and their names for the wire."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from autogen_agentchat.agents import BaseChatAgent
from autogen_agentchat.base import Response, TaskResult
from autogen_agentchat.teams import BaseGroupChat
from autogen_core._message_handler_context import MessageHandlerContext
from opentelemetry import context as otel_context
from opentelemetry.context import Context

from lightning_openai.watch import Watch, current_watch, watched
from lightning_spans import spans as names
from lightning_spans.context import entered, entered_steps, overlaid, with_agent
from lightning_spans.patches import Undo, replace, replace_in_subclasses
from lightning_spans.recorder import agent_path, current_span

if TYPE_CHECKING:
    from autogen_core import AgentId

    from lightning_spans.recorder import OpenSpan, Recorder

PLUGIN: Final = "lightning_autogen"
FRAMEWORK: Final = "autogen"


def bind(recorder: Recorder) -> Callable[[], None]:
    """Follow every agent, team and message handler, until the callable that is given back is called."""
    at_work = AtWork(recorder)
    undo = Undo()
    undo.add(at_work.stop)
    undo.add(replace_in_subclasses(BaseChatAgent, "on_messages", at_work.wrap_on_messages))
    undo.add(replace_in_subclasses(BaseChatAgent, "on_messages_stream", at_work.wrap_on_messages_stream))
    undo.add(replace_in_subclasses(BaseGroupChat, "run_stream", at_work.wrap_run_stream))
    undo.add(replace(MessageHandlerContext, "populate_context", at_work.wrap_populate_context))
    return undo


class Handling:
    """A message handler of AutoGen's core: its span begins only when it calls a model or a tool, as few do.

    It is the wire's watch, which asks for the place of a call before the call's span begins. This is how the hidden
    calls of a Selector team's manager are named, and those of agents that are written for the core alone.
    """

    def __init__(self, recorder: Recorder, name: str) -> None:
        self._recorder = recorder
        self._name = name
        self._outer = current_watch()
        self._around = current_span()
        self.span: OpenSpan | None = None

    def called(self) -> None:
        """A chat span began; what is around is told too."""
        if self._outer is not None:
            self._outer.called()

    def outside(self) -> Context | None:
        """Give the place of what begins now; None where something else of ours is already around it."""
        if current_span() is not self._around:
            return None
        if self.span is None:
            self.span = begin_agent(self._recorder, self._name)
        return self.span.context


class AtWork:
    """Begins and ends the spans of agents and teams."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._live = True
        self._open: dict[str, OpenSpan] = {}  # by span id
        self._teams: dict[str, Context] = {}  # by the id of the team that runs, also on a runtime of the user's

    def stop(self) -> None:
        """End what is open, and hear no more."""
        self._live = False
        for span in reversed(list(self._open.values())):
            span.end()

    def wrap_on_messages(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """An agent works, from its messages to its response."""

        async def on_messages(agent: Any, *args: Any, **kwargs: Any) -> Any:
            span = None if self._is_at_work(agent) else self._begin(agent)
            if span is None:
                return await original(agent, *args, **kwargs)
            with self._working(span), entered(span.context):
                return await original(agent, *args, **kwargs)

        return on_messages

    def wrap_on_messages_stream(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """The same, as a stream that ends with the response."""

        def on_messages_stream(agent: Any, *args: Any, **kwargs: Any) -> Any:
            items = original(agent, *args, **kwargs)
            return items if self._is_at_work(agent) else self._steps(lambda: self._begin(agent), items, Response)

        return on_messages_stream

    def wrap_run_stream(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A team runs, as a stream that ends with the result; `run` reads this one."""

        def run_stream(team: Any, *args: Any, **kwargs: Any) -> Any:
            items = original(team, *args, **kwargs)
            return self._steps(lambda: self._begin_team(team), items, TaskResult) if self._live else items

        return run_stream

    def wrap_populate_context(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A message handler of the core runs."""

        def populate_context(cls: Any, ctx: AgentId) -> Any:
            around = original(cls, ctx)
            return self._handling(around, ctx) if self._live else around

        return populate_context

    @contextmanager
    def _handling(self, around: Any, agent_id: AgentId) -> Iterator[None]:
        with around:
            outer = otel_context.get_current()
            handling = None
            with self._recorder.guard(PLUGIN):
                team = self._teams.get(agent_id.key)
                otel_context.attach(overlaid(team) if team is not None else outer)
                name = agent_id.type.removesuffix(f"_{agent_id.key}")
                handling = Handling(self._recorder, name)
                otel_context.attach(watched(handling, with_agent(name)))
            try:
                yield
            except BaseException as error:
                if handling is not None and handling.span is not None:
                    handling.span.end(error=error)
                raise
            finally:
                otel_context.attach(overlaid(outer))
                if handling is not None and handling.span is not None:
                    handling.span.end()

    def _is_at_work(self, agent: Any) -> bool:
        """Whether an agent has its span already: its methods call each other, and those of their parents."""
        around = current_span()
        if not self._live or around is None or around.attributes.get(names.FRAMEWORK) != FRAMEWORK:
            return not self._live
        return around.operation == names.INVOKE_AGENT and bool(around.name == agent.name)

    def _begin(self, agent: Any) -> OpenSpan | None:
        with self._recorder.guard(PLUGIN):
            return self._kept(begin_agent(self._recorder, agent.name))
        return None

    def _begin_team(self, team: Any) -> OpenSpan | None:
        with self._recorder.guard(PLUGIN):
            name = str(getattr(team, "_name", None) or type(team).__name__)  # teams have names since 0.6.3
            path = {names.FRAMEWORK: FRAMEWORK, names.AGENT_PATH: agent_path(name)}
            span = self._kept(self._recorder.start(names.INVOKE_WORKFLOW, name, attributes=path))
            self._teams[team._team_id] = span.context
            return span
        return None

    def _kept(self, span: OpenSpan) -> OpenSpan:
        self._open[span.span_id] = span
        return span

    async def _steps(
        self, begin: Callable[[], OpenSpan | None], items: AsyncGenerator[Any, None], last: type
    ) -> AsyncIterator[Any]:
        span = begin()
        if span is None:  # that failed, and was logged
            async for item in items:
                yield item
            return
        with self._working(span):
            steps = entered_steps(span.context, items)
            try:
                async for item in steps:
                    if isinstance(item, last):
                        self._end(span)  # now, because many readers leave here and let the generator lie
                    yield item
            finally:
                await steps.aclose()

    @contextmanager
    def _working(self, span: OpenSpan) -> Iterator[None]:
        try:
            yield
        except GeneratorExit:
            if span.end_ns is None:
                span.set(**{names.ABANDONED: True})
            raise
        except BaseException as error:
            self._end(span, error)
            raise
        finally:
            self._end(span)

    def _end(self, span: OpenSpan, error: BaseException | None = None) -> None:
        self._open.pop(span.span_id, None)
        for team_id, context in list(self._teams.items()):
            if context is span.context:
                self._teams.pop(team_id, None)
        span.end(error=error)


def begin_agent(recorder: Recorder, name: str) -> OpenSpan:
    """Begin the span of an agent."""
    return recorder.start(names.INVOKE_AGENT, name, agent=name, attributes={names.FRAMEWORK: FRAMEWORK})


def place() -> Context:
    """Give the context for a tool or model that begins now; a message handler's span begins with it."""
    watch: Watch | None = current_watch()
    context = watch.outside() if watch is not None else None
    return otel_context.get_current() if context is None else context
