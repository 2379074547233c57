"""The OTLP receiver: ``POST /v1/traces``, protobuf and JSON, from our own tracers and from anybody else's."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from starlette.types import Receive, Scope, Send

from lightning_spans.errors import RefusedError, StoreError
from lightning_spans.live import EVERYTHING, Live, sampled
from lightning_spans.otlp import JSON, PROTOBUF, read
from lightning_spans.spans import LIVE, Span
from lightning_trainer.server.door import Door
from lightning_trainer.server.foreign import adopted
from lightning_trainer.server.keys import Grant
from lightning_trainer.server.metrics import Metrics
from lightning_trainer.server.refusals import Refusal, bad_request, store_down
from lightning_trainer.server.settings import Limits
from lightning_trainer.server.wire import headers, read_body, send_bytes
from lightning_trainer.server.writer import QueueFullError, Writer

_INLINE_BYTES: Final = 32 * 1024  # larger bodies are read in a thread, so that chats are not held up


@dataclass(frozen=True, slots=True)
class Sorted:
    """The spans of a request, sorted by whether its key may send them."""

    taken: tuple[Span, ...]
    rejected: int
    message: str

    def also(self, complaints: Sequence[str]) -> Sorted:
        """Reject more, one for each complaint."""
        if not complaints:
            return self
        message = "; ".join(
            text for text in (self.message, f"{len(complaints)} are wrong, as this one: {complaints[0]}") if text
        )
        return replace(self, rejected=self.rejected + len(complaints), message=message)


class OtlpReceiver:
    """Takes spans, turns them into our schema, keeps them."""

    def __init__(
        self, *, door: Door, writer: Writer, metrics: Metrics, limits: Limits, live: Live = EVERYTHING
    ) -> None:
        self._door = door
        self._writer = writer
        self._metrics = metrics
        self._limits = limits
        self._live = live

    async def traces(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer ``POST /v1/traces``. The answer is sent when the spans are on disk.

        Raises:
            Refusal: no good key (401, 403), not OTLP (400, 415), too large (413), or too much waits already (503).
        """
        grant = await self._door.admit(scope, "attempt", "runner", "live", "admin", late_s=self._limits.late_spans_s)
        content_type = headers(scope).get(b"content-type", b"").decode("latin-1").split(";")[0].strip().lower()
        if content_type not in {PROTOBUF, JSON}:
            raise Refusal(415, f"content-type {content_type!r}: OTLP is {PROTOBUF} or {JSON}")
        body = await read_body(scope, receive, self._limits.body_bytes)
        if (told := headers(scope).get(b"x-lightning-sender")) is not None:
            self._metrics.sender(told.decode("latin-1"))
        try:
            inline = len(body) <= _INLINE_BYTES
            spans, wrong = _read(body, content_type) if inline else await asyncio.to_thread(_read, body, content_type)
        except ValueError as error:
            raise bad_request(str(error)) from None
        if wrong and not spans:
            raise bad_request(wrong[0])
        result = sort(spans, grant).also(wrong)
        if grant.scope == "live":
            result = replace(result, taken=await asyncio.to_thread(self._of_production, result.taken))
        refused = await self._keep(result.taken)
        self._metrics.spans("kept", len(result.taken) - len(refused))
        result = result.also(refused)
        self._metrics.spans("rejected", result.rejected)
        await send_bytes(send, _reply(result, content_type), kind=content_type.encode())

    def _of_production(self, spans: Sequence[Span]) -> tuple[Span, ...]:
        """Leave out what is not sampled, and mask the rest before it is kept."""
        kept = [span for span in spans if sampled(span.trace_id, self._live.rate)]
        clean = tuple(self._live.redaction(span) for span in kept)
        self._metrics.spans("sampled_out", len(spans) - len(kept))
        self._metrics.spans("redacted", sum(new is not old for new, old in zip(clean, kept, strict=True)))
        return clean

    async def _keep(self, spans: Sequence[Span]) -> list[str]:
        """Keep spans. Gives why the store will never keep some of them; the others are on disk."""
        if not spans:
            return []
        try:
            await self._writer.spans(spans)
        except RefusedError as error:
            if len(spans) == 1:
                return [str(error)]
            middle = len(spans) // 2  # one bad span must not cost the others of its request
            return [*await self._keep(spans[:middle]), *await self._keep(spans[middle:])]
        except QueueFullError as error:
            self._metrics.spans("refused", len(spans))
            message = f"{error}: send these again later"
            raise Refusal(503, message, "server_error", "overloaded", {"retry-after": "1"}) from None
        except StoreError as error:
            self._metrics.spans("refused", len(spans))
            raise store_down(error) from error
        return []


def _read(body: bytes, content_type: str) -> tuple[list[Span], list[str]]:
    spans, wrong = read(body, content_type)
    return [adopted(span) for span in spans], wrong


def sort(spans: Sequence[Span], grant: Grant) -> Sorted:
    """Say which spans a key may send.

    An attempt's key its own only; spans that name no attempt become the key's. A live key those of no attempt, and they
    are marked as live, whatever they say.
    """
    if grant.scope == "live":
        free = tuple(replace(s, origin=LIVE) for s in spans if s.attempt_id is None and s.rollout_id is None)
        rejected = len(spans) - len(free)
        message = f"{rejected} spans name an attempt; a live key sends spans of none"
        return Sorted(free, rejected, message if rejected else "")
    if grant.attempt_id is None:
        return Sorted(tuple(spans), 0, "")
    own = (grant.rollout_id, grant.attempt_id)
    taken = tuple(
        replace(span, rollout_id=grant.rollout_id, attempt_id=grant.attempt_id)
        for span in spans
        if span.attempt_id in {None, grant.attempt_id} and span.rollout_id in {None, grant.rollout_id}
    )
    rejected = len(spans) - len(taken)
    message = f"{rejected} spans name another attempt than {own[1]} of rollout {own[0]}, whose key this is"
    return Sorted(taken, rejected, message if rejected else "")


def _reply(result: Sorted, content_type: str) -> bytes:
    from google.protobuf.json_format import MessageToJson
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

    response = ExportTraceServiceResponse()
    if result.rejected:
        response.partial_success.rejected_spans = result.rejected
        response.partial_success.error_message = result.message
    if content_type == JSON:
        return str(MessageToJson(response, indent=None)).encode()
    return bytes(response.SerializeToString())
