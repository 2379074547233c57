"""Agent spans: record which agent or team makes each model call."""

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

from lightning_autogen import FRAMEWORK
from lightning_spans.record.context import Steps, attach, current, overlaid, settle_context, use_context, with_agent
from lightning_spans.record.instrument.patches import replace, replace_in_subclasses
from lightning_spans.record.instrument.scope import Scope, current_scope
from lightning_spans.record.instrument.tracker import Tracker
from lightning_spans.record.recorder import agent_path, current_span
from lightning_spans.schema import spans as names

if TYPE_CHECKING:
    from autogen_core import AgentId

    from lightning_spans.hooks import OpenSpan, Recorder

_SENDER: Final = "_lightning_sender"
# Whether the current message is a tool call, which runs for the agent that sent it.
_tool_call: ContextVar[bool] = ContextVar("lightning_autogen_tool_call", default=False)


def bind(recorder: Recorder) -> Iterator[Callable[[], None]]:
    """Patch AutoGen to record every agent, team and message handler; what is yielded removes each patch."""
    agents = AutogenAgents(recorder, FRAMEWORK)
    yield agents.stop
    yield replace_in_subclasses(BaseChatAgent, "on_messages", agents.wrap_on_messages)
    yield replace_in_subclasses(BaseChatAgent, "on_messages_stream", agents.wrap_on_messages_stream)
    yield replace_in_subclasses(BaseGroupChat, "run_stream", agents.wrap_run_stream)
    yield replace(MessageHandlerContext, "populate_context", agents.wrap_populate_context)
    yield replace(runtimes, "get_telemetry_envelope_metadata", agents.wrap_metadata)
    for name in ("_process_send", "_process_publish"):
        yield replace(SingleThreadedAgentRuntime, name, agents.wrap_process)


class Handling(Scope):
    """A message handler of AutoGen's core. Its span begins at its first model or tool call; few handlers make one.

    This names the internal calls of a Selector team's manager, and of agents written against the core alone.
    """

    __slots__ = ("_agents", "_around", "_name")

    def __init__(self, agents: AutogenAgents, name: str, here: Context) -> None:
        super().__init__(here)
        self._agents = agents
        self._name = name
        self._around = current_span(here)

    def call_begins(self) -> Context | None:
        """Start the handler's span, unless another recorded span already surrounds the call."""
        if self.closed or current_span() is not self._around:
            return None
        if self.span is None:
            self.span = self._agents.begin_agent(self._name)
        return None if self.span is None else self.span.context


class AutogenAgents(Tracker):
    """Starts and ends spans around agents and teams."""

    def __init__(self, recorder: Recorder, framework: str) -> None:
        super().__init__(recorder, framework)
        self._teams: dict[str, Context] = {}  # by the id of the team that runs, also on a runtime that the user created

    def wrap_on_messages(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap an agent's work, from its messages to its response."""

        async def on_messages(agent: Any, *args: Any, **kwargs: Any) -> Any:
            with self.inside(None if self._has_span(agent) else self.begin_agent(agent.name)):
                return await original(agent, *args, **kwargs)

        return on_messages

    def wrap_on_messages_stream(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap an agent's work as a stream that ends with the response."""

        def on_messages_stream(agent: Any, *args: Any, **kwargs: Any) -> Any:
            items = original(agent, *args, **kwargs)
            begin = functools.partial(self.begin_agent, agent.name)
            return items if self._has_span(agent) else self._until(begin, items, Response)

        return on_messages_stream

    def wrap_run_stream(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a team's run, a stream that ends with the result. `run` reads this stream."""

        def run_stream(team: Any, *args: Any, **kwargs: Any) -> Any:
            items = original(team, *args, **kwargs)
            begin = functools.partial(self._begin_team, team)
            end = functools.partial(self._end_team, team)
            return self._until(begin, items, TaskResult, end) if self.live else items

        return run_stream

    def wrap_metadata(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the sending of a message: the metadata that AutoGen keeps for tracing also carries the sender's context.

        A runtime runs in the context in which it was started, which may belong to another attempt.
        """

        def get_telemetry_envelope_metadata() -> Any:
            metadata = original()
            if self.live:
                with self.guard():
                    setattr(metadata, _SENDER, _sender())
            return metadata

        return get_telemetry_envelope_metadata

    def wrap_process(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the delivery of a message to its handlers, in a task of the runtime."""

        async def process(runtime: Any, envelope: Any) -> Any:
            sender = getattr(envelope.metadata, _SENDER, None)
            _tool_call.set(isinstance(envelope.message, FunctionCall))
            if sender is None or not self.live:
                return await original(runtime, envelope)
            with use_context(overlaid(sender)):
                return await original(runtime, envelope)

        return process

    def wrap_populate_context(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a message handler of the core."""

        def populate_context(cls: Any, ctx: AgentId) -> Any:
            around = original(cls, ctx)
            return self._handling(around, ctx) if self.live and not _tool_call.get() else around

        return populate_context

    @contextmanager
    def _handling(self, around: Any, agent_id: AgentId) -> Iterator[None]:
        with around:
            handling: Handling | None = None
            with self.guard():
                team = self._teams.get(agent_id.key)
                name = agent_id.type.removesuffix(f"_{agent_id.key}")
                context = settle_context() if team is None else overlaid(team)
                handling = Handling(self, name, context)
                handling.enter(with_agent(name, context))
            failed: BaseException | None = None
            try:
                yield
            except BaseException as error:
                failed = error
                raise
            finally:
                if handling is not None:
                    handling.leave()
                    self.end(handling.span, error=failed)

    def _has_span(self, agent: Any) -> bool:
        """Whether an agent already has its span. Its methods call each other and those of their parent classes."""
        around = current_span()
        if not self.live or around is None or around.attributes.get(names.FRAMEWORK) != FRAMEWORK:
            return not self.live
        return around.operation == names.INVOKE_AGENT and bool(around.name == agent.name)

    def _begin_team(self, team: Any) -> OpenSpan | None:
        with self.guard():
            name = str(getattr(team, "_name", None) or type(team).__name__)  # teams have names since 0.6.3
            path = {names.AGENT_PATH: agent_path(name)}
            span = self.begin(names.INVOKE_WORKFLOW, name, attributes=path)
            if span is not None:
                self._teams[team._team_id] = span.context
            return span
        return None

    def _end_team(self, team: Any) -> None:
        with self.guard():
            self._teams.pop(team._team_id, None)

    async def _until(
        self,
        begin: Callable[[], OpenSpan | None],
        items: AsyncGenerator[Any, None],
        last: type,
        end: Callable[[], None] = lambda: None,
    ) -> AsyncIterator[Any]:
        """Return a generator's items. The span begins with the first item and ends with the last relevant one."""
        span = begin()
        steps = Steps(None if span is None else span.context)
        with self.working(span):
            try:
                steps.enter()
                async for item in items:
                    usual = current() is steps.entered
                    if usual:  # inlined for speed: there are many items
                        attach(steps.outer)
                        steps.inside = False
                    else:
                        steps.leave()
                    if isinstance(item, last):
                        self.end(span)  # end it now: many readers stop here without closing the generator
                    yield item
                    if usual and current() is steps.outer:
                        attach(steps.entered)
                        steps.inside = True
                    else:
                        steps.enter()
            finally:
                await steps.close(items)
                end()


def _sender() -> Context:
    """Return the context of a message's sender. An agent of the core begins its span here, unless one surrounds it."""
    scope, context = current_scope(), None
    if isinstance(scope, Handling) and (scope.span is not None or current_span() is None):
        context = scope.call_begins()
    return settle_context() if context is None else context
