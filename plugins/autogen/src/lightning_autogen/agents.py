"""Agents and teams at work: their spans, and their names for the wire."""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final

from autogen_agentchat.agents import BaseChatAgent
from autogen_agentchat.base import Response, TaskResult
from autogen_agentchat.teams import BaseGroupChat
from autogen_core import FunctionCall, SingleThreadedAgentRuntime
from autogen_core import _single_threaded_agent_runtime as runtimes
from autogen_core._message_handler_context import MessageHandlerContext
from opentelemetry.context import Context

from lightning_spans import spans as names
from lightning_spans.context import Steps, attach, current, entered, overlaid, settled, with_agent
from lightning_spans.following import Following
from lightning_spans.patches import Undo, replace, replace_in_subclasses
from lightning_spans.recorder import agent_path, current_span
from lightning_spans.stays import Watch, current_watch, watched

if TYPE_CHECKING:
    from autogen_core import AgentId

    from lightning_spans.recorder import OpenSpan, Recorder

PLUGIN: Final = "lightning_autogen"
FRAMEWORK: Final = "autogen"
_SENDER: Final = "_lightning_sender"
# Whether the message that is handled is a tool call: it is carried out for the agent that sent it.
_tool_call: ContextVar[bool] = ContextVar("lightning_autogen_tool_call", default=False)


def bind(recorder: Recorder) -> Callable[[], None]:
    """Follow every agent, team and message handler, until the callable that is given back is called."""
    at_work = AtWork(recorder, PLUGIN, FRAMEWORK)
    undo = Undo()
    undo.add(at_work.stop)
    undo.add(replace_in_subclasses(BaseChatAgent, "on_messages", at_work.wrap_on_messages))
    undo.add(replace_in_subclasses(BaseChatAgent, "on_messages_stream", at_work.wrap_on_messages_stream))
    undo.add(replace_in_subclasses(BaseGroupChat, "run_stream", at_work.wrap_run_stream))
    undo.add(replace(MessageHandlerContext, "populate_context", at_work.wrap_populate_context))
    undo.add(replace(runtimes, "get_telemetry_envelope_metadata", at_work.wrap_metadata))
    for name in ("_process_send", "_process_publish"):
        undo.add(replace(SingleThreadedAgentRuntime, name, at_work.wrap_process))
    return undo


class Handling:
    """A message handler of AutoGen's core: its span begins only when it calls a model or a tool, as few do.

    It is the wire's watch, which asks for the place of a call before the call's span begins. This is how the hidden
    calls of a Selector team's manager are named, and those of agents that are written for the core alone.
    """

    def __init__(self, at_work: AtWork, name: str) -> None:
        self._at_work = at_work
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
            self.span = self._at_work.begin_agent(self._name)
        return None if self.span is None else self.span.context


class AtWork(Following):
    """Begins and ends the spans of agents and teams."""

    def __init__(self, recorder: Recorder, plugin: str, framework: str) -> None:
        super().__init__(recorder, plugin, framework)
        self._teams: dict[str, Context] = {}  # by the id of the team that runs, also on a runtime of the user's

    def wrap_on_messages(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """An agent works, from its messages to its response."""

        async def on_messages(agent: Any, *args: Any, **kwargs: Any) -> Any:
            with self.inside(None if self._is_at_work(agent) else self.begin_agent(agent.name)):
                return await original(agent, *args, **kwargs)

        return on_messages

    def wrap_on_messages_stream(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """The same, as a stream that ends with the response."""

        def on_messages_stream(agent: Any, *args: Any, **kwargs: Any) -> Any:
            items = original(agent, *args, **kwargs)
            begin = functools.partial(self.begin_agent, agent.name)
            return items if self._is_at_work(agent) else self._until(begin, items, Response)

        return on_messages_stream

    def wrap_run_stream(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A team runs, as a stream that ends with the result; `run` reads this one."""

        def run_stream(team: Any, *args: Any, **kwargs: Any) -> Any:
            items = original(team, *args, **kwargs)
            begin = functools.partial(self._begin_team, team)
            return self._until(begin, items, TaskResult) if self.live else items

        return run_stream

    def wrap_metadata(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A message is sent: what AutoGen keeps for its own tracing keeps its sender's context too.

        A runtime works in the context in which it was started, which may be another attempt's.
        """

        def get_telemetry_envelope_metadata() -> Any:
            metadata = original()
            if self.live:
                with self.recorder.guard(PLUGIN):
                    setattr(metadata, _SENDER, _sender())
            return metadata

        return get_telemetry_envelope_metadata

    def wrap_process(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A message is handed to its handlers, in a task of the runtime's."""

        async def process(runtime: Any, envelope: Any) -> Any:
            sender = getattr(envelope.metadata, _SENDER, None)
            _tool_call.set(isinstance(envelope.message, FunctionCall))
            if sender is None or not self.live:
                return await original(runtime, envelope)
            with entered(overlaid(sender)):
                return await original(runtime, envelope)

        return process

    def wrap_populate_context(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A message handler of the core runs."""

        def populate_context(cls: Any, ctx: AgentId) -> Any:
            around = original(cls, ctx)
            return self._handling(around, ctx) if self.live and not _tool_call.get() else around

        return populate_context

    @contextmanager
    def _handling(self, around: Any, agent_id: AgentId) -> Iterator[None]:
        with around:
            outer = current()
            handling = None
            with self.recorder.guard(PLUGIN):
                team = self._teams.get(agent_id.key)
                attach(overlaid(team) if team is not None else outer)
                name = agent_id.type.removesuffix(f"_{agent_id.key}")
                handling = Handling(self, name)
                attach(watched(handling, with_agent(name)))
            failed: BaseException | None = None
            try:
                yield
            except BaseException as error:
                failed = error
                raise
            finally:
                attach(overlaid(outer))
                self.end(None if handling is None else handling.span, error=failed)

    def _is_at_work(self, agent: Any) -> bool:
        """Whether an agent has its span already: its methods call each other, and those of their parents."""
        around = current_span()
        if not self.live or around is None or around.attributes.get(names.FRAMEWORK) != FRAMEWORK:
            return not self.live
        return around.operation == names.INVOKE_AGENT and bool(around.name == agent.name)

    def _begin_team(self, team: Any) -> OpenSpan | None:
        with self.recorder.guard(PLUGIN):
            name = str(getattr(team, "_name", None) or type(team).__name__)  # teams have names since 0.6.3
            path = {names.AGENT_PATH: agent_path(name)}
            span = self.begin(names.INVOKE_WORKFLOW, name, attributes=path)
            if span is not None:
                self._teams[team._team_id] = span.context
            return span
        return None

    async def _until(
        self, begin: Callable[[], OpenSpan | None], items: AsyncGenerator[Any, None], last: type
    ) -> AsyncIterator[Any]:
        """Give the items of a generator; its span begins with the first and ends with the last that counts."""
        span = begin()
        steps = Steps(None if span is None else span.context)
        with self.working(span):
            try:
                steps.enter()
                async for item in items:
                    usual = current() is steps.entered
                    if usual:  # there are many items, and a call costs more than these lines
                        attach(steps.outer)
                        steps.inside = False
                    else:
                        steps.leave()
                    if isinstance(item, last):
                        self.end(span)  # now, because many readers leave here and let the generator lie
                    yield item
                    if usual and current() is steps.outer:
                        attach(steps.entered)
                        steps.inside = True
                    else:
                        steps.enter()
            finally:
                await steps.close(items)
                if self._teams and span is not None:
                    self._teams = {key: value for key, value in self._teams.items() if value is not span.context}


def _sender() -> Context:
    """Give the context of who sends a message: an agent of the core begins its span with it, unless one is around."""
    watch, context = current_watch(), None
    if isinstance(watch, Handling) and (watch.span is not None or current_span() is None):
        context = watch.outside()
    return settled() if context is None else context


def place() -> Context:
    """Give the context for a tool or model that begins now; a message handler's span begins with it."""
    watch: Watch | None = current_watch()
    context = watch.outside() if watch is not None else None
    return settled() if context is None else context
