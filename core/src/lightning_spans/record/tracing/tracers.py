"""Two tracers with the same records: OpenTelemetry spans, or the same without the SDK's pipeline."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final

from opentelemetry import trace as otel_trace
from opentelemetry.context import Context
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from lightning_spans.errors import ConfigError
from lightning_spans.record.context import STARTING
from lightning_spans.record.delivery.ended import CLOSE_S
from lightning_spans.record.delivery.otlp import flatten
from lightning_spans.record.process import at_end, in_child, within
from lightning_spans.record.tracing.listeners import SpanFeed
from lightning_spans.schema import spans as names
from lightning_spans.schema.spans import Json, Span

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider

    from lightning_spans.record.delivery.collector import Collector
    from lightning_spans.record.delivery.ended import EndedSpan, Sink
    from lightning_spans.record.recorder import RecordingSpan, Tracer
    from lightning_spans.schema.attempts import Attempt

TRACERS: Final = ("otel", "embedded")
_SAMPLED: Final = TraceFlags(TraceFlags.SAMPLED)


def is_sdk_disabled() -> bool:
    """Whether ``OTEL_SDK_DISABLED`` turns OpenTelemetry's SDK off: it creates no spans, we still do."""
    return os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"


def make_tracer(
    kind: str,
    sink: Sink,
    processors: Sequence[SpanProcessor] = (),
    *,
    collector: Collector | None = None,
    keeps: Callable[[Span | EndedSpan, Attempt | None], bool] | None = None,
    prepare: Callable[[Span, Attempt | None], Span] | None = None,
) -> Tracer:
    """Create a tracer by name.

    Args:
        kind: ``otel`` or ``embedded``.
        sink: receives the spans.
        processors: get the SDK's spans, with the tracer ``otel``.
        collector: gets them too, and is notified when its time is over.
        keeps: whether a span is recorded at all; processors do not get the others.
        prepare: masks what processors must not get.

    Raises:
        ConfigError: see `check_tracer`.
    """
    check_tracer(kind, processors)
    if kind == "embedded":
        return EmbeddedTracer(sink)
    return OtelTracer(sink, processors, collector=collector, keeps=keeps, prepare=prepare)


def check_tracer(kind: str, processors: Sequence[SpanProcessor]) -> None:
    """Reject an unknown tracer.

    Raises:
        ConfigError: the name is not one of `TRACERS`, or ``embedded`` is given processors, which it would not call.
    """
    if kind not in TRACERS:
        raise ConfigError(f"tracer {kind!r} is unknown. Use one of: {', '.join(TRACERS)}.")
    if processors and kind == "embedded":
        raise ConfigError('tracer="embedded" makes no spans that a span processor could see. Use tracer="otel".')


class Ids:
    """Generates ids, as the SDK's generators do.

    It does not use the global random generator, as the SDK does: a program that seeds it would get the same ids in
    every run, and other random numbers than without us. Nor the system's: each call releases the interpreter's lock and
    waits for it.
    """

    def __init__(self) -> None:
        self._random = random.Random()
        self._starting = threading.local()  # the attempt whose root the SDK is about to start in this thread
        in_child(self._seed)

    def _seed(self) -> None:
        self._random.seed()

    def generate_span_id(self) -> int:
        """Return 64 bits, not all zero."""
        return self._random.getrandbits(64) or 1

    def generate_trace_id(self) -> int:
        """Return 128 bits, not all zero; those of the attempt whose root starts."""
        attempt: Attempt | None = getattr(self._starting, "attempt", None)
        return int(trace_of(attempt), 16) if attempt is not None else self._random.getrandbits(128) or 1

    @contextmanager
    def starting(self, span: RecordingSpan) -> Iterator[None]:
        """Tell the SDK's generator whose root it makes an id for within the block."""
        self._starting.attempt = _its_own(span) if span.parent is None else None
        try:
            yield
        finally:
            self._starting.attempt = None

    def is_trace_id_random(self) -> bool:
        """Whether all bits are random: they are."""
        return True

    def give(self, span: RecordingSpan) -> None:
        """Give a span its ids: as a child of its parent, or as a root in its attempt's trace or a new one."""
        parent = span.parent
        if parent is not None:
            span.trace_id = parent.trace_id
        elif (attempt := _its_own(span)) is not None:
            span.trace_id = trace_of(attempt)
        else:
            span.trace_id = f"{self.generate_trace_id():032x}"
        span.span_id = f"{self.generate_span_id():016x}"


def _its_own(span: RecordingSpan) -> Attempt | None:
    """Return the attempt whose trace a root belongs to: one of the training side's, where all of its spans go."""
    return span.attempt if span.attempt is not None and span.attempt.endpoint else None


def trace_of(attempt: Attempt) -> str:
    """Return the trace id of an attempt, 32 hex digits: one run of the user's function is one trace.

    Without a framework's root, each call of a program is a root. Calls that only the gateway saw have this id too.
    """
    return blake2b(attempt.attempt_id.encode(), digest_size=16).hexdigest()


class EmbeddedTracer:
    """Generates ids itself and passes records directly to the sink."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._ids = Ids()

    def start(self, span: RecordingSpan, context: Context) -> None:
        """Give the new span its ids."""
        del context
        self._ids.give(span)

    def end(self, span: RecordingSpan) -> None:
        """Pass the span to the sink."""
        self._sink.put(span, span.attempt)

    def flush(self, timeout_s: float) -> bool:
        """Wait for the sink."""
        return self._sink.flush(timeout_s)

    def close(self, timeout_s: float) -> None:
        """Close the sink."""
        self._sink.close(timeout_s)


class OtelTracer:
    """Creates spans of OpenTelemetry's SDK, through its own provider; the user's is not touched.

    They are created only if a span processor gets them. Otherwise they would cost half of all that recording costs, for
    no receiver; and the SDK's provider detects the process's resources again in every forked child.

    A processor's `on_start` is called as the span begins. It gets the ended span in its own thread: the record is made
    first, and neither that nor a slow processor delays the agent.
    """

    def __init__(
        self,
        sink: Sink,
        processors: Sequence[SpanProcessor] = (),
        *,
        collector: Collector | None = None,
        keeps: Callable[[Span | EndedSpan, Attempt | None], bool] | None = None,
        prepare: Callable[[Span, Attempt | None], Span] | None = None,
    ) -> None:
        self._sink = sink
        self._ids = Ids()
        self._collector = collector
        self._prepare = prepare
        self._provider: TracerProvider | None = None
        self._tracer: otel_trace.Tracer | None = None
        self._ended: SpanFeed | None = None
        if processors or collector is not None:
            from lightning_spans.record.tracing.processors import make_provider

            self._provider = make_provider(self._ids, [*processors, *([collector] if collector else [])], keeps)
            self._tracer = self._provider.get_tracer("lightning_spans")
            self._ended = SpanFeed(self._show, "a span processor", part="span processor")
            self._undo_end = at_end(self, self._close_processors)

    def start(self, span: RecordingSpan, context: Context) -> None:
        """Give the new span its ids, and begin the SDK's span if a processor gets it."""
        if self._tracer is None:
            self._ids.give(span)
            return
        # Only our spans are parents. An open span of the user's own tracing is not in our store: under it,
        # our root would look like an orphan.
        parent = otel_trace.INVALID_SPAN_CONTEXT if span.parent is None else _context_of(span.parent)
        above = otel_trace.NonRecordingSpan(parent)
        with self._ids.starting(span):
            span.handle = self._tracer.start_span(
                span.name,
                context=Context({**otel_trace.set_span_in_context(above, context), STARTING: span}),
                kind=SpanKind.CLIENT if span.operation == names.CHAT else SpanKind.INTERNAL,
                start_time=span.start_ns,
            )
        made = span.handle.get_span_context()
        span.trace_id, span.span_id = f"{made.trace_id:032x}", f"{made.span_id:016x}"

    def end(self, span: RecordingSpan) -> None:
        """Pass the span to the sink, and to the processors' thread."""
        # Our record, not the SDK's span: reading that back costs 14 µs, and values that are not plain are lost.
        self._sink.put(span, span.attempt)
        if self._ended is not None and span.handle is not None and span.handle.is_recording():
            self._ended.tell(span)

    def _show(self, span: RecordingSpan) -> None:
        """End the SDK's span with the record's values, masked as for the store, and with what viewers read."""
        from lightning_spans.record.delivery.openinference import add_viewer_attributes

        handle: Any = span.handle
        record = span.record() if self._prepare is None else self._prepare(span.record(), span.attempt)
        handle.update_name(record.name)
        handle.set_attributes(
            {key: value for key, value in flatten(add_viewer_attributes(record)).items() if _is_plain(value)}
        )
        if record.status == "error":
            handle.set_status(Status(StatusCode.ERROR, record.status_message))
        elif record.status == "ok":
            handle.set_status(Status(StatusCode.OK))
        handle.end(end_time=record.end_ns)

    def flush(self, timeout_s: float) -> bool:
        """Wait for the sink and for the processors."""
        until = time.monotonic() + timeout_s
        delivered = self._sink.flush(timeout_s)
        if self._ended is None or self._provider is None:
            return delivered
        shown = self._ended.flush(max(0.0, until - time.monotonic()))
        left_s = max(0.0, until - time.monotonic())
        provider = self._provider
        return within(left_s, lambda: provider.force_flush(max(1, int(1000 * left_s)))) and shown and delivered

    def close(self, timeout_s: float) -> None:
        """Close the sink and the provider, whose processors may wait for a collector that is gone."""
        self._sink.close(timeout_s)
        self._close_processors(timeout_s)

    def _close_processors(self, timeout_s: float = CLOSE_S) -> None:
        if self._ended is not None and self._provider is not None:
            until = time.monotonic() + timeout_s
            self._undo_end()
            self._ended.close(timeout_s)
            if not within(max(0.0, until - time.monotonic()), self._provider.shutdown) and self._collector is not None:
                self._collector.give_up()
            self._ended = None


def _is_plain(value: Json) -> bool:
    """Whether OpenTelemetry accepts a value as an attribute."""
    items = value if isinstance(value, (list, tuple)) else (value,)
    return all(isinstance(item, (str, bool, int, float)) for item in items)


def _context_of(span: RecordingSpan) -> SpanContext:
    return SpanContext(int(span.trace_id, 16), int(span.span_id, 16), is_remote=False, trace_flags=_SAMPLED)
