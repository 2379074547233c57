"""The user's own collector, reached with the exporter of OpenTelemetry's SDK. What it cannot send is spooled."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import Final

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from lightning_spans.record.delivery.otlp import lift
from lightning_spans.record.delivery.outbox import Spool
from lightning_spans.record.process import in_child
from lightning_spans.schema.spans import Span, Status
from lightning_spans.store.urls import without_secrets

logger = logging.getLogger("lightning_spans")

QUEUE_SIZE: Final = 16_384
PAUSE_S: Final = 15.0  # seconds after a failure in which everything is spooled; the spool's delivery retries by itself


class Collector(SpanProcessor):
    """Sends spans in batches. It reads the SDK's variables: ``OTEL_EXPORTER_OTLP_HEADERS``, ``OTEL_BSP_...``.

    The SDK drops what its exporter cannot send, and what is waiting at shutdown. Here both are spooled.

    Args:
        endpoint: an OTLP/HTTP endpoint, including ``/v1/traces``.
        spool: keeps what could not be sent; the sink delivers it from there.
    """

    def __init__(self, endpoint: str, spool: Spool) -> None:
        self._endpoint = endpoint
        self._spool = spool
        self._batches = BatchSpanProcessor(_Sends(self), max_queue_size=QUEUE_SIZE)
        self._begin()
        in_child(self._begin)

    def _begin(self) -> None:
        self._lock = threading.Condition()
        self._waiting: dict[int, ReadableSpan] = {}  # by span id
        # created in the sending process: a forked child needs its own connections
        self._exporter: SpanExporter | None = None
        self._given = self._settled = 0
        self._retry_at = 0.0

    def on_end(self, span: ReadableSpan) -> None:
        """Add a span to the next batch."""
        with self._lock:
            full = len(self._waiting) >= QUEUE_SIZE
            if not full:
                self._waiting[_id(span)] = span
                self._given += 1
        if full:
            self._keep([span])
        else:
            self._batches.on_end(span)

    def send(self, spans: Sequence[ReadableSpan]) -> None:
        """Send a batch, or spool it."""
        sent = False
        if time.monotonic() >= self._retry_at:
            self._exporter = self._exporter or OTLPSpanExporter(endpoint=self._endpoint)
            sent = self._exporter.export(spans) is SpanExportResult.SUCCESS
            self._retry_at = 0.0 if sent else time.monotonic() + PAUSE_S
        with self._lock:
            taken = [span for span in spans if self._waiting.pop(_id(span), None) is not None]
        if not sent and taken:
            self._keep(taken)
        with self._lock:
            self._settled += len(taken)
            self._lock.notify_all()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Send what is waiting. Unlike the SDK, also wait for a batch that is being sent."""
        self._batches.force_flush(timeout_millis)
        with self._lock:
            given = self._given
            return self._lock.wait_for(lambda: self._settled >= given, timeout_millis / 1000)

    def shutdown(self) -> None:
        """Send what is waiting, and stop."""
        self._batches.shutdown()  # type: ignore[no-untyped-call]
        if self._exporter is not None:
            self._exporter.shutdown()

    def give_up(self) -> None:
        """Spool everything not sent yet, even if the collector may still accept it.

        A span sent twice is stored once.
        """
        with self._lock:
            left, self._waiting = list(self._waiting.values()), {}
        if left:
            self._keep(left)

    def _keep(self, spans: Sequence[ReadableSpan]) -> None:
        kept = self._spool.append(self._endpoint, None, [_record(span) for span in spans])
        lost = "" if kept else "; they are dropped"
        where = without_secrets(self._endpoint)
        logger.warning("lightning: %d spans are not sent to %s%s", len(spans), where, lost or "; they wait")


class _Sends(SpanExporter):
    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self._collector.send(spans)
        return SpanExportResult.SUCCESS  # what was not sent is spooled


def _id(span: ReadableSpan) -> int:
    return span.context.span_id if span.context is not None else 0


def _record(span: ReadableSpan) -> Span:
    """Read the record back from the SDK's span."""
    context = span.get_span_context()
    assert context is not None  # noqa: S101 - a span that has ended has one
    status: Status = "ok" if span.status.is_ok else "error"
    return Span(
        name=span.name,
        trace_id=f"{context.trace_id:032x}",
        span_id=f"{context.span_id:016x}",
        parent_id=None if span.parent is None else f"{span.parent.span_id:016x}",
        start_ns=span.start_time or 0,
        end_ns=span.end_time or 0,
        status=status,
        status_message=span.status.description or "",
        **lift(dict(span.attributes or {})),
    )
