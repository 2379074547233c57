"""The recorder: framework events in, spans out. It never raises into the agent."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from opentelemetry.context import Context

from lightning_spans.hooks import listens
from lightning_spans.record.context import (
    at_work,
    current_agent,
    current_attempt,
    current_terms,
    overlaid,
    settle_context,
)
from lightning_spans.record.process import in_child
from lightning_spans.schema import spans as names
from lightning_spans.schema.agents import escape_name, path_of, selects
from lightning_spans.schema.attempts import Attempt
from lightning_spans.schema.spans import Json, Span, Status

if TYPE_CHECKING:
    from lightning_spans.hooks import Caller, OpenSpan

logger = logging.getLogger("lightning_spans")

_DEFAULT: Any = object()
_NOWHERE = Context()
_BY_AGENTS = frozenset({names.CHAT, names.EXECUTE_TOOL})  # what an agent does
_finishing = threading.Lock()


def _after_fork() -> None:
    global _finishing  # noqa: PLW0603 - one that another thread held does not come free in a forked child
    _finishing = threading.Lock()


in_child(_after_fork)


class Tracer(Protocol):
    """Creates and delivers spans; `otel` and `embedded` produce identical records."""

    def start(self, span: RecordingSpan, context: Context) -> None:
        """Give the new span its `trace_id` and `span_id`: its parent's trace, or a new one."""
        ...

    def end(self, span: RecordingSpan) -> None:
        """Deliver the record of an ended span. The record is best made by the delivering thread, not the agent's."""
        ...

    def flush(self, timeout_s: float) -> bool:
        """Wait until all spans ended so far are delivered or spooled; False if the time ran out."""
        ...

    def close(self, timeout_s: float) -> None:
        """Deliver or spool what is pending, and stop. What is not delivered when the time runs out is spooled."""
        ...


class RecordingSpan:
    """A span that has begun. Call `end` once; further calls change nothing."""

    __slots__ = (
        "_begun_in", "_context", "_record", "_recorder", "agent", "attempt", "attributes", "end_ns", "given",
        "handle", "name", "operation", "parent", "span_id", "start_ns", "status", "status_message", "trace_id",
    )  # fmt: skip

    def __init__(
        self,
        recorder: SpanRecorder,
        operation: str,
        name: str,
        agent: str | None,
        attributes: dict[str, Json],
    ) -> None:
        self._recorder = recorder
        self._begun_in: Context
        self._context: Context | None = None
        self._record: Span | None = None
        self.operation = operation
        self.name = name
        self.agent = agent
        self.attributes = attributes
        self.parent: RecordingSpan | None = None
        self.attempt: Attempt | None = None
        self.trace_id = ""  # 32 hex digits
        self.span_id = ""  # 16 hex digits
        self.handle: Any = None  # the tracer's own
        self.given: Any = None  # of a tool in a replay: its recorded outcome; see `record.replay`
        self.start_ns = 0
        self.end_ns: int | None = None
        self.status: Status = "unset"
        self.status_message = ""

    @property
    def context(self) -> Context:
        """The context with the span as the current one and its agent at work.

        Created on request, because few are entered.
        """
        if self._context is None:
            # Not OTel's own current span: the user's traces would get a parent that no backend of theirs has.
            self._context = at_work(self.agent, self.attempt, {**self._begun_in, _SPAN: self})
        return self._context

    def context_in(self, context: Context) -> Context:
        """Return this context with the span as the current one and its agent at work; other values in it are kept."""
        return self.context if context is self._begun_in else overlaid(self.context, context)

    @property
    def parent_id(self) -> str | None:
        """The parent's 16 hex digits; None for a root."""
        return None if self.parent is None else self.parent.span_id

    @property
    def path(self) -> str | None:
        """The agent's path, outermost first; None if nothing named one."""
        return None if self.agent is None else path_of(self.agent, self.attributes.get(names.AGENT_PATH))

    @property
    def traceparent(self) -> str:
        """The W3C header that makes a server's spans and calls children of this one."""
        return f"00-{self.trace_id}-{self.span_id}-01"

    def set(self, **attributes: Json) -> None:
        """Add attributes, given as `set(**{names.TOOL_NAME: "sum"})`; None values are left out."""
        self.attributes.update(_without_none(attributes))

    def end(
        self,
        *,
        error: BaseException | str | None = None,
        attributes: Mapping[str, Json] | None = None,
        end_ns: int | None = None,
        later: Later | None = None,
    ) -> None:
        """End the span and pass it to the sink.

        Args:
            error: what went wrong; None if nothing did.
            attributes: added before it is delivered.
            end_ns: Unix time in nanoseconds; now by default.
            later: called once the span has ended, to `set` more. If it raises, that is logged, and the span is kept.
        """
        self._recorder.end(self, error=error, attributes=attributes, end_ns=end_ns, later=later)

    @property
    def unnamed(self) -> bool:
        """Whether a hook must still name its agent."""
        return self.agent is None and self._record is None and self._recorder.names_agents

    def record(self) -> Span:
        """Return the record of the ended span. Waits for the hook that names its agent."""
        return self._record or self._recorder.finish(self)

    def draft(self) -> Span:
        """Return the record, with the agent known so far."""
        if self.unnamed:
            return self._make_span()
        if self._record is None:  # without the lock of `finish`, which may be held while another span is named
            self._record = self._make_span()
        return self._record

    def _make_span(self) -> Span:
        return Span(
            operation=self.operation,
            name=self.name,
            trace_id=self.trace_id,
            span_id=self.span_id,
            parent_id=self.parent_id,
            start_ns=self.start_ns,
            end_ns=max(self.start_ns, self.end_ns or self.start_ns),
            status=self.status,
            status_message=self.status_message,
            agent=self.agent,
            rollout_id=self.attempt.rollout_id if self.attempt else None,
            attempt_id=self.attempt.attempt_id if self.attempt else None,
            attributes=self.attributes,
        )


Later: TypeAlias = Callable[[], None]
_SPAN = "lightning-span"


def _without_none(attributes: Mapping[str, Json]) -> dict[str, Json]:
    return {name: value for name, value in attributes.items() if value is not None}


def current_span(context: Context | None = None) -> RecordingSpan | None:
    """Return our span that is open in this context; None if there is none."""
    found = (settle_context() if context is None else context).get(_SPAN)
    return found if isinstance(found, RecordingSpan) else None


def agent_path(name: str, context: Context | None = None) -> str:
    """Return the path of an agent that begins in this context, outermost first. A slash within a name is doubled."""
    around = current_span(context)
    while around is not None and around.operation != names.INVOKE_AGENT and names.AGENT_PATH not in around.attributes:
        around = around.parent
    own = escape_name(name)
    if around is None:
        return own
    return f"{around.attributes.get(names.AGENT_PATH) or escape_name(around.name)}/{own}"


def standing(agent: str, context: Context | None = None) -> str:
    """Return the path of an agent at work in this context: under its own span, or one without a span."""
    around = current_span(context)
    while around is not None and around.operation != names.INVOKE_AGENT:
        around = around.parent
    known = None if around is None or around.agent != agent else around.attributes.get(names.AGENT_PATH)
    return path_of(agent, known) if known is not None else agent_path(agent, context)


class SpanRecorder:
    """Begins and ends spans for every attached framework of this process."""

    def __init__(
        self,
        tracer: Tracer,
        *,
        on_end: Callable[[RecordingSpan], None] = lambda _: None,
        name_agent: Callable[[RecordingSpan], str | None] | None = None,
        agents: Sequence[str] | None = None,
        store: str | None = None,
    ) -> None:
        self.tracer = tracer
        self.store = store  # where spans outside attempts go
        self._on_end = on_end
        self._name_agent = name_agent
        self._agents = agents
        self._guards: dict[str, _Guard] = {}  # it has no state, so one object serves all

    @property
    def names_agents(self) -> bool:
        """Whether hooks are asked for the agents of unnamed spans."""
        return self._name_agent is not None

    def reroutes(self, span: Caller) -> bool:
        """Whether a model call goes to the policy: its attempt selects its agent, and `attach(agents=)` allows it."""
        if span.attempt is None or not span.attempt.reroutes(span.path):
            return False
        return self._agents is None or selects(self._agents, span.path)

    def start(
        self,
        operation: str,
        name: str,
        *,
        agent: str | None = _DEFAULT,
        parent: OpenSpan | None = None,
        context: Context | None = None,
        attributes: Mapping[str, Json] | None = None,
        start_ns: int | None = None,
    ) -> RecordingSpan:
        """Begin a span; see `hooks.Recorder.start`."""
        if parent is not None:
            context = parent.context
        elif context is None:
            context = settle_context()
        above = parent if isinstance(parent, RecordingSpan) else current_span(context)
        if above is not None and above._recorder is not self and not self._joins(above):
            above = None
        if agent is _DEFAULT:
            agent = current_agent(context)
        kept = {} if attributes is None else _without_none(attributes)
        if operation == names.INVOKE_AGENT:
            kept.setdefault(names.AGENT_PATH, agent_path(name, _NOWHERE if above is None else context))
        elif agent is not None and above is not None and operation in _BY_AGENTS:
            path = standing(agent, context)
            if path != agent:
                kept[names.AGENT_PATH] = path
        span = RecordingSpan(self, operation, name, agent, kept)
        span._begun_in = context
        span.parent = above
        # A span takes its attempt from its open parent; only a root takes it from the context.
        span.attempt = above.attempt if above is not None else current_attempt(context)
        if span.attempt is None:  # training needs no terms: its data is the user's own
            kept.update(current_terms(context))
        span.start_ns = time.time_ns() if start_ns is None else start_ns
        self.tracer.start(span, context)
        return span

    def _joins(self, parent: RecordingSpan) -> bool:
        """Whether a span of an earlier recorder has the same destination.

        Under a parent with another one, it is an orphan.
        """
        return parent._recorder.store == self.store or (parent.attempt is not None and bool(parent.attempt.endpoint))

    def end(
        self,
        span: RecordingSpan,
        *,
        error: BaseException | str | None = None,
        attributes: Mapping[str, Json] | None = None,
        end_ns: int | None = None,
        later: Later | None = None,
    ) -> None:
        """End a span and pass it to the sink; see `RecordingSpan.end`. Ending it again changes nothing."""
        if span.end_ns is not None:
            return
        span.end_ns = time.time_ns() if end_ns is None else end_ns
        if attributes:
            span.set(**attributes)
        if error is None:
            span.status = "ok"
        else:
            span.status = "error"
            span.status_message = str(error)
            if isinstance(error, BaseException):
                span.attributes.setdefault(names.ERROR_TYPE, type(error).__qualname__)
        if later is not None:
            try:
                later()
            except Exception as raised:  # noqa: BLE001 - logged
                log_failure("what was left for later", raised, span)
        # A waiting span holds no context, and so none of the objects around it: the agent could not reuse their
        # memory, which is slow. But a hook that names its agent may read the context.
        span._context = None
        if span.agent is not None or not listens("lightning_agent_name"):
            span._begun_in = _NOWHERE
        try:  # no `guard`, which costs three calls
            self.tracer.end(span)
        except Exception as raised:  # noqa: BLE001 - logged
            log_failure("tracer", raised, span)
        try:
            self._on_end(span)
        except Exception as raised:  # noqa: BLE001 - logged
            log_failure("lightning_span_ended", raised, span)

    def finish(self, span: RecordingSpan) -> Span:
        """Make the record of an ended span, and have its agent named."""
        with _finishing:  # the sink and the listeners call this, each in its own thread
            if span.unnamed and self._name_agent is not None:
                try:
                    span.agent = self._name_agent(span)
                except Exception as raised:  # noqa: BLE001 - logged
                    log_failure("lightning_agent_name", raised, span)
                span._begun_in, span._context = _NOWHERE, None
            if span._record is None:
                span._record = span._make_span()
            return span._record

    def guard(self, plugin: str, span: OpenSpan | None = None) -> AbstractContextManager[None]:
        """Log an error within the block instead of raising it into the agent."""
        if span is not None:
            return _Guard(plugin, span)
        known = self._guards.get(plugin)
        return known if known is not None else self._guards.setdefault(plugin, _Guard(plugin, None))


def log_failure(plugin: str, error: Exception, span: OpenSpan | None = None) -> None:
    """Log an error while recording a framework's event, instead of raising it into the agent."""
    where = f" at span {span.operation} {span.name!r} {span.span_id}" if span is not None else ""
    logger.error(
        "lightning: %s failed%s; the agent continues, this event is not recorded",
        plugin,
        where,
        exc_info=(type(error), error, error.__traceback__),
    )


class _Guard:
    """A class, because a generator costs twice as much, and a call passes several."""

    __slots__ = ("_plugin", "_span")

    def __init__(self, plugin: str, span: OpenSpan | None) -> None:
        self._plugin = plugin
        self._span = span

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        log_failure(self._plugin, error, self._span)
        return True
