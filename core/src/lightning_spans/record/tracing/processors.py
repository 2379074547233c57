"""OpenTelemetry's SDK for the tracer ``otel``: our own provider, for the given span processors."""

# First, because hooks for forked children run in the order of registration: the provider's hook uses executors, whose
# lock this module's hook releases. In the other order the child hangs (opentelemetry-sdk 1.45, Python 3.11).
import concurrent.futures.thread  # noqa: F401
import logging
from collections.abc import Callable, Sequence
from typing import Any

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace import Span as SdkSpan
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, Decision, Sampler, SamplingResult

from lightning_spans.record.context import STARTING
from lightning_spans.record.delivery.ended import EndedSpan
from lightning_spans.schema.attempts import Attempt
from lightning_spans.schema.spans import Span

logger = logging.getLogger("lightning_spans")
Keeps = Callable[[Span | EndedSpan, Attempt | None], bool]


def make_provider(ids: Any, processors: Sequence[SpanProcessor], keeps: Keeps | None) -> TracerProvider:
    """Create a separate provider.

    Args:
        ids: generates the ids.
        processors: get its spans; none of them can harm the agent or another one.
        keeps: whether a span is recorded; None: all are.
    """
    unset = SpanLimits.UNSET
    # Given explicitly, because the defaults come from OTEL_* variables that the user set for their own traces.
    provider = TracerProvider(
        sampler=ALWAYS_ON if keeps is None else _RecordedOnly(keeps),
        resource=Resource({"service.name": "lightning"}),
        span_limits=SpanLimits(max_span_attributes=unset, max_attributes=unset, max_span_attribute_length=unset),
        id_generator=ids,
        shutdown_on_exit=False,
    )
    for processor in processors:
        provider.add_span_processor(_GuardedProcessor(processor))
    return provider


class _RecordedOnly(Sampler):
    """Samples what is recorded, so that a trace is complete both in the store and at a collector, or in neither."""

    def __init__(self, keeps: Keeps) -> None:
        self._keeps = keeps

    def should_sample(self, parent_context: Context | None, trace_id: int, *_: Any, **__: Any) -> SamplingResult:
        span: Any = (parent_context or Context()).get(STARTING)
        span.trace_id = f"{trace_id:032x}"
        return SamplingResult(Decision.RECORD_AND_SAMPLE if self._keeps(span, span.attempt) else Decision.DROP)

    def get_description(self) -> str:
        return "what lightning records"


class _GuardedProcessor(SpanProcessor):
    """A processor whose errors are logged: the SDK would raise them into the agent, and skip the other processors."""

    def __init__(self, processor: SpanProcessor) -> None:
        self._processor = processor

    def on_start(self, span: SdkSpan, parent_context: Context | None = None) -> None:
        self._call("on_start", span, parent_context)

    def on_end(self, span: ReadableSpan) -> None:
        self._call("on_end", span)

    def shutdown(self) -> None:
        self._call("shutdown")

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._call("force_flush", timeout_millis) is not False

    def _call(self, method: str, *arguments: Any) -> Any:
        try:
            return getattr(self._processor, method)(*arguments)
        except Exception:
            logger.exception("lightning: %s of %s failed", method, type(self._processor).__qualname__)
            return None
