"""The OTLP receiver: ``POST /v1/traces``, protobuf and JSON, from our own tracers and from any other."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from starlette.types import Receive, Scope, Send

from lightning_spans.errors import QueueFullError, RefusedError, StoreError
from lightning_spans.record.delivery.otlp import JSON, PROTOBUF
from lightning_spans.record.delivery.otlp_reader import read
from lightning_spans.record.production import EVERYTHING, Live, is_sampled
from lightning_spans.schema.spans import LIVE, TRAINING, Span
from lightning_spans.terms import join_terms
from lightning_trainer.gateway.auth.access import Access
from lightning_trainer.gateway.auth.keys import Grant
from lightning_trainer.gateway.auth.keys import Scope as KeyScope
from lightning_trainer.gateway.auth.leases import Leases
from lightning_trainer.gateway.http.asgi import headers, send_bytes
from lightning_trainer.gateway.http.errors import Refusal, bad_request, store_down
from lightning_trainer.gateway.http.metrics import Metrics
from lightning_trainer.gateway.http.weight import too_heavy as heavier
from lightning_trainer.gateway.ingest import wire
from lightning_trainer.gateway.ingest.openinference import adopt_span
from lightning_trainer.gateway.ingest.writer import RecordWriter
from lightning_trainer.gateway.intake.intake import INLINE_BYTES, Intake
from lightning_trainer.gateway.settings import Limits

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor


def _request() -> Descriptor:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    return ExportTraceServiceRequest.DESCRIPTOR


@dataclass(frozen=True, slots=True)
class SortedSpans:
    """The spans of a request, sorted by whether its key may send them."""

    taken: tuple[Span, ...]
    rejected: int
    message: str

    def also(self, complaints: Sequence[str]) -> SortedSpans:
        """Reject more spans, one for each complaint."""
        if not complaints:
            return self
        message = "; ".join(
            text for text in (self.message, f"{len(complaints)} are wrong, as this one: {complaints[0]}") if text
        )
        return replace(self, rejected=self.rejected + len(complaints), message=message)


class OtlpReceiver:
    """Receives spans, converts them to our schema, and stores them."""

    def __init__(
        self,
        *,
        access: Access,
        leases: Leases,
        intake: Intake,
        writer: RecordWriter,
        metrics: Metrics,
        limits: Limits,
        live: Live = EVERYTHING,
    ) -> None:
        self._access = access
        self._leases = leases
        self._intake = intake
        self._writer = writer
        self._metrics = metrics
        self._limits = limits
        self._live = live

    async def traces(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer ``POST /v1/traces``. The response is sent when the spans are on disk.

        Raises:
            Refusal: no valid key (401, 403), not OTLP (400, 415), too large (413), or too many are waiting (503).
        """
        scopes: tuple[KeyScope, ...] = ("attempt", "runner", "live", "caller", "admin")
        grant = await self._access.admit(scope, *scopes, late_s=self._limits.late_spans_s)
        content_type = headers(scope).get(b"content-type", b"").decode("latin-1").split(";")[0].strip().lower()
        if content_type not in {PROTOBUF, JSON}:
            raise Refusal(415, f"content-type {content_type!r}: OTLP is {PROTOBUF} or {JSON}")
        spans, wrong = await self._intake.parsed(scope, receive, grant, partial(self._read, content_type))
        if (told := headers(scope).get(b"x-lightning-sender")) is not None:
            self._metrics.sender(told.decode("latin-1"), grant.scope, str(grant.attempt_id or grant.key_id))
        if wrong and not spans:
            raise bad_request(wrong[0])
        self._intake.quotas.take(grant, "spans", len(spans))
        result = sort(spans, grant).also(wrong)
        if grant.scope == "runner":
            result = await asyncio.to_thread(self._of_runner, result, grant)
        if grant.is_live:
            result = replace(result, taken=await asyncio.to_thread(self._of_production, result.taken))
        refused = await self._keep(result.taken)
        self._metrics.spans("kept", len(result.taken) - len(refused))
        result = result.also(refused)
        self._metrics.spans("rejected", result.rejected)
        await send_bytes(send, _reply(result, content_type), kind=content_type.encode())

    def _read(self, content_type: str, body: bytes) -> tuple[list[Span], list[str]]:
        """Parse a body after counting its spans from its bytes."""
        most = self._limits.parsed_bytes
        weigh = heavier if content_type == JSON else partial(wire.too_heavy, descriptor=_request())
        if len(body) > INLINE_BYTES and weigh(body, most=most):  # a smaller one cannot become anything large
            message = f"the body's spans would take more than {most} bytes of memory: send fewer at once"
            raise Refusal(413, message, code="request_too_large")
        try:
            spans, wrong = read(body, content_type)
        except ValueError as error:
            raise bad_request(str(error)) from None
        if len(spans) + len(wrong) > self._limits.request_spans:
            most = self._limits.request_spans
            message = f"{len(spans) + len(wrong)} spans in one request; at most {most} are taken: send fewer at once"
            raise Refusal(413, message, code="request_too_large")
        return [adopt_span(span) for span in spans], wrong

    def _of_runner(self, result: SortedSpans, grant: Grant) -> SortedSpans:
        """Reject all spans but those of attempts that were claimed with this key.

        Ids of attempts can be guessed: one that nobody has claimed yet may become another runner's.
        """
        named = {span.attempt_id for span in result.taken if span.attempt_id is not None}
        rollouts = self._leases.own_rollouts(grant, named)
        taken, complaints = [], []
        for span in result.taken:
            rollout_id = rollouts.get(span.attempt_id or "")
            if rollout_id is not None and span.rollout_id in {None, rollout_id}:
                taken.append(replace(span, rollout_id=rollout_id, origin=TRAINING))
            else:
                owner = f"attempt {span.attempt_id} of rollout {span.rollout_id}"
                complaints.append(f"it names {owner}; a runner's key sends spans of attempts that were claimed with it")
        return replace(result, taken=tuple(taken)).also(complaints)

    def _of_production(self, spans: Sequence[Span]) -> tuple[Span, ...]:
        """Leave out spans that are not sampled, and mask the others before they are stored."""
        kept = [span for span in spans if is_sampled(span.trace_id, self._live.rate)]
        clean = tuple(self._live.redaction(span) for span in kept)
        self._metrics.spans("sampled_out", len(spans) - len(kept))
        self._metrics.spans("redacted", sum(new is not old for new, old in zip(clean, kept, strict=True)))
        return clean

    async def _keep(self, spans: Sequence[Span]) -> list[str]:
        """Store spans. Returns why the store will never keep some of them; the others are on disk."""
        if not spans:
            return []
        try:
            await self._writer.spans(spans)
        except RefusedError as error:
            if len(spans) == 1:
                return [str(error)]
            middle = len(spans) // 2  # one invalid span must not cost the others of its request
            return [*await self._keep(spans[:middle]), *await self._keep(spans[middle:])]
        except QueueFullError as error:
            self._metrics.spans("refused", len(spans))
            message = f"{error}: send these again later"
            raise Refusal(503, message, "server_error", "overloaded", {"retry-after": "1"}) from None
        except StoreError as error:
            self._metrics.spans("refused", len(spans))
            raise store_down(error) from error
        return []


def sort(spans: Sequence[Span], grant: Grant) -> SortedSpans:
    """Sort spans by whether a key may send them.

    An attempt's key may send only its own; spans that name no attempt become the key's. A live key may send those of no
    attempt. Spans of attempts are labelled as training and the others as live, whatever they say: what is read as
    production needs consent, which nobody asks of an attempt.
    """
    if grant.is_live:
        terms = dict(grant.terms)
        free = tuple(
            replace(
                s,
                origin=LIVE,
                attributes={**s.attributes, **join_terms(s.attributes, terms)} if terms else s.attributes,
            )
            for s in spans
            if s.attempt_id is None and s.rollout_id is None
        )
        rejected = len(spans) - len(free)
        message = f"{rejected} spans name an attempt; a live key sends spans of none"
        return SortedSpans(free, rejected, message if rejected else "")
    if grant.attempt_id is None:
        return SortedSpans(tuple(spans), 0, "")
    own = (grant.rollout_id, grant.attempt_id)
    taken = tuple(
        replace(span, rollout_id=grant.rollout_id, attempt_id=grant.attempt_id, origin=TRAINING)
        for span in spans
        if span.attempt_id in {None, grant.attempt_id} and span.rollout_id in {None, grant.rollout_id}
    )
    rejected = len(spans) - len(taken)
    message = f"{rejected} spans name another attempt than {own[1]} of rollout {own[0]}, whose key this is"
    return SortedSpans(taken, rejected, message if rejected else "")


def _reply(result: SortedSpans, content_type: str) -> bytes:
    from google.protobuf.json_format import MessageToJson
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

    response = ExportTraceServiceResponse()
    if result.rejected:
        response.partial_success.rejected_spans = result.rejected
        response.partial_success.error_message = result.message
    if content_type == JSON:
        return str(MessageToJson(response, indent=None)).encode()
    return bytes(response.SerializeToString())
