"""Two tracers, one record: real OpenTelemetry spans, or the same without the SDK's pipeline."""

from __future__ import annotations

import os
import random
import threading
from typing import TYPE_CHECKING, Any, Final

from opentelemetry import trace as otel_trace
from opentelemetry.context import Context
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from lightning_spans import spans as names
from lightning_spans.errors import ConfigError
from lightning_spans.forks import in_child
from lightning_spans.otlp import flatten

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider

    from lightning_spans.recorder import OpenSpan, Tracer
    from lightning_spans.sinks import Sink

TRACERS: Final = ("otel", "embedded")
_SAMPLED: Final = TraceFlags(TraceFlags.SAMPLED)


def make_tracer(kind: str, sink: Sink) -> Tracer:
    """Make a tracer by name.

    Raises:
        ConfigError: the name is neither ``otel`` nor ``embedded``, or OTEL_SDK_DISABLED forbids ``otel``.
    """
    if kind == "otel":
        return OtelTracer(sink)
    if kind == "embedded":
        return EmbeddedTracer(sink)
    raise ConfigError(f"tracer {kind!r} is unknown. Use one of: {', '.join(TRACERS)}.")


class Ids:
    """Makes ids, as the SDK's generators do.

    Not from the global generator, as the SDK's own: a program that seeds it would get the same ids in every run, and
    other numbers than without us. Nor from the system: each call lets go of the interpreter's lock, and waits for it.
    """

    def __init__(self) -> None:
        self._random = random.Random()
        in_child(self._seed)

    def _seed(self) -> None:
        self._random.seed()

    def generate_span_id(self) -> int:
        """Give 64 bits, not all zero."""
        return self._random.getrandbits(64) or 1

    def generate_trace_id(self) -> int:
        """Give 128 bits, not all zero."""
        return self._random.getrandbits(128) or 1

    def is_trace_id_random(self) -> bool:
        """All bits are."""
        return True

    def give(self, span: OpenSpan) -> None:
        """Give a span its ids: a child of its parent, or the root of a new trace."""
        parent = span.parent
        span.trace_id = f"{self.generate_trace_id():032x}" if parent is None else parent.trace_id
        span.span_id = f"{self.generate_span_id():016x}"


class EmbeddedTracer:
    """Makes ids itself and hands records straight to the sink."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._ids = Ids()

    def start(self, span: OpenSpan, context: Context) -> None:
        """Give the new span its ids."""
        del context
        self._ids.give(span)

    def end(self, span: OpenSpan) -> None:
        """Hand the span to the sink."""
        self._sink.put(span, span.attempt)

    def flush(self, timeout_s: float) -> bool:
        """Wait for the sink."""
        return self._sink.flush(timeout_s)

    def close(self, timeout_s: float) -> None:
        """Close the sink."""
        self._sink.close(timeout_s)


class OtelTracer:
    """Shows every span to OTel's span processors, through a provider of its own; the user's is never touched.

    The SDK is used where a processor is there to see its spans. Without one they would cost half of all that recording
    costs, for nobody; and its provider looks for the process's resources anew in every forked child.
    """

    def __init__(self, sink: Sink) -> None:
        if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
            raise ConfigError('OTEL_SDK_DISABLED is set, so tracer="otel" records nothing. Use tracer="embedded".')
        self._sink = sink
        self._ids = Ids()
        self._provider: TracerProvider | None = None
        self._tracer: otel_trace.Tracer | None = None

    def add_span_processor(self, processor: SpanProcessor) -> None:
        """Show every span of ours to an OTel span processor, as it begins and ends."""
        if self._provider is None:
            self._provider = _provider(self._ids)
            self._tracer = self._provider.get_tracer("lightning_spans")
        self._provider.add_span_processor(processor)

    def start(self, span: OpenSpan, context: Context) -> None:
        """Give the new span its ids, and begin the SDK's where it is seen."""
        if self._tracer is None:
            self._ids.give(span)
            return
        # Only a span of ours is a parent. A span that the user's own tracing has open is not in our store: under it,
        # our root would look like an orphan.
        parent = otel_trace.INVALID_SPAN_CONTEXT if span.parent is None else _context_of(span.parent)
        above = otel_trace.NonRecordingSpan(parent)
        span.handle = self._tracer.start_span(
            span.name,
            context=otel_trace.set_span_in_context(above, context),
            kind=SpanKind.CLIENT if span.operation == names.CHAT else SpanKind.INTERNAL,
            start_time=span.start_ns,
        )
        made = span.handle.get_span_context()
        span.trace_id, span.span_id = f"{made.trace_id:032x}", f"{made.span_id:016x}"

    def end(self, span: OpenSpan) -> None:
        """Hand the span to the sink, and show the processors what its record holds."""
        # Ours, not what the SDK made of it: reading that back costs 14 µs, and what is no plain value is gone.
        self._sink.put(span, span.attempt)
        handle: Any = span.handle
        if handle is None:
            return
        record = span.record()
        handle.update_name(record.name)
        handle.set_attributes(flatten(record))
        if record.status == "error":
            handle.set_status(Status(StatusCode.ERROR, record.status_message))
        elif record.status == "ok":
            handle.set_status(Status(StatusCode.OK))
        handle.end(end_time=record.end_ns)

    def flush(self, timeout_s: float) -> bool:
        """Wait for the sink."""
        return self._sink.flush(timeout_s)

    def close(self, timeout_s: float) -> None:
        """Close the sink and the provider, whose processors may wait for a collector that is gone."""
        self._sink.close(timeout_s)
        if self._provider is not None:
            ending = threading.Thread(target=self._provider.shutdown, name="lightning-processors", daemon=True)
            ending.start()
            ending.join(timeout_s)


def _provider(ids: Any) -> TracerProvider:
    # First, as hooks for forked children run in the order of their registration: the provider's uses executors, whose
    # lock this module's hook frees. In the other order the child hangs (opentelemetry-sdk 1.45, Python 3.11).
    import concurrent.futures.thread  # noqa: F401

    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import SpanLimits, TracerProvider
    from opentelemetry.sdk.trace.sampling import ALWAYS_ON

    unset = SpanLimits.UNSET
    # Explicit, because the defaults come from OTEL_* variables that the user set for his own traces.
    return TracerProvider(
        sampler=ALWAYS_ON,
        resource=Resource({"service.name": "lightning"}),
        span_limits=SpanLimits(max_span_attributes=unset, max_attributes=unset, max_span_attribute_length=unset),
        id_generator=ids,
        shutdown_on_exit=False,
    )


def _context_of(span: OpenSpan) -> SpanContext:
    return SpanContext(int(span.trace_id, 16), int(span.span_id, 16), is_remote=False, trace_flags=_SAMPLED)
