"""Two tracers, one record: real OpenTelemetry spans, or the same without the SDK's pipeline."""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING, Any, Final

from opentelemetry import trace as otel_trace
from opentelemetry.context import Context
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from lightning_spans import spans as names
from lightning_spans.errors import ConfigError
from lightning_spans.otlp import flatten

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor

    from lightning_spans.recorder import OpenSpan, Tracer
    from lightning_spans.sinks import Sink

TRACERS: Final = ("otel", "embedded")


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


def _parent(span: OpenSpan) -> SpanContext | None:
    # Only a span of ours is a parent. A span that the user's own tracing has open is not in our store: under it, our
    # root would look like an orphan.
    return span.parent.span_context if span.parent is not None else None


class EmbeddedTracer:
    """Makes ids itself and hands records straight to the sink."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        # Not the global generator: a program that seeds it would get the same ids in every run. Nor the system's own:
        # each call of it lets go of the interpreter's lock, and waits to get it back.
        self._random = random.Random()
        os.register_at_fork(after_in_child=self._random.seed)

    def start(self, span: OpenSpan, context: Context | None) -> SpanContext:
        """Give the new span its ids."""
        del context
        parent = _parent(span)
        span.parent_id = f"{parent.span_id:016x}" if parent else None
        return SpanContext(
            trace_id=parent.trace_id if parent else self._random.getrandbits(128) or 1,
            span_id=self._random.getrandbits(64) or 1,
            is_remote=False,
            trace_flags=TraceFlags(TraceFlags.SAMPLED),
        )

    def end(self, span: OpenSpan) -> None:
        """Hand the record to the sink."""
        self._sink.put(span.record(), span.attempt)

    def flush(self, timeout_s: float) -> bool:
        """Wait for the sink."""
        return self._sink.flush(timeout_s)

    def close(self) -> None:
        """Close the sink."""
        self._sink.close()


class OtelTracer:
    """Makes real OTel spans with a provider of its own; the user's global provider is never touched."""

    def __init__(self, sink: Sink) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import SpanLimits, TracerProvider
        from opentelemetry.sdk.trace.sampling import ALWAYS_ON

        self._sink = sink
        unset = SpanLimits.UNSET
        # Explicit, because the defaults come from OTEL_* variables that the user set for his own traces.
        provider = TracerProvider(
            sampler=ALWAYS_ON,
            resource=Resource({"service.name": "lightning"}),
            span_limits=SpanLimits(max_span_attributes=unset, max_attributes=unset, max_span_attribute_length=unset),
            shutdown_on_exit=False,
        )
        self._tracer = provider.get_tracer("lightning_spans")
        if isinstance(self._tracer, otel_trace.NoOpTracer):
            raise ConfigError('OTEL_SDK_DISABLED is set, so tracer="otel" records nothing. Use tracer="embedded".')
        self._provider = provider
        self._heard = False

    def add_span_processor(self, processor: SpanProcessor) -> None:
        """Show every span of ours to an OTel span processor, as it begins and ends."""
        self._heard = True
        self._provider.add_span_processor(processor)

    def start(self, span: OpenSpan, context: Context | None) -> SpanContext:
        """Begin a real span."""
        parent = _parent(span)
        above = otel_trace.NonRecordingSpan(parent) if parent else otel_trace.INVALID_SPAN
        handle = self._tracer.start_span(
            span.name,
            context=otel_trace.set_span_in_context(above, context),
            kind=SpanKind.CLIENT if span.operation == names.CHAT else SpanKind.INTERNAL,
            start_time=span.start_ns,
        )
        span.handle = handle
        span.parent_id = f"{parent.span_id:016x}" if parent else None
        return handle.get_span_context()

    def end(self, span: OpenSpan) -> None:
        """End the real span and hand what the SDK made of it to the sink."""
        handle: Any = span.handle
        record = span.record()
        if self._heard:  # it costs 17 µs, and without a processor nobody can see it
            handle.set_attributes(flatten(record))
        if span.status == "error":
            handle.set_status(Status(StatusCode.ERROR, span.status_message))
        elif span.status == "ok":
            handle.set_status(Status(StatusCode.OK))
        handle.end(end_time=span.end_ns)
        # The record, not what the SDK made of it: reading that back costs 14 µs, and what is no plain value is gone.
        self._sink.put(record, span.attempt)

    def flush(self, timeout_s: float) -> bool:
        """Wait for the sink."""
        return self._sink.flush(timeout_s)

    def close(self) -> None:
        """Close the sink and the provider."""
        self._sink.close()
        self._provider.shutdown()
