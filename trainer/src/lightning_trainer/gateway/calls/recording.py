"""The record of one model call, kept exactly once, whatever the call's outcome."""

from __future__ import annotations

from lightning_spans.errors import StoreError
from lightning_spans.record.production import Live, is_sampled
from lightning_spans.schema.calls import Call
from lightning_spans.schema.spans import TRAINING
from lightning_trainer.gateway.http.errors import Refusal, store_down
from lightning_trainer.gateway.http.masking import masking_logger
from lightning_trainer.gateway.http.metrics import Metrics
from lightning_trainer.gateway.ingest.writer import RecordWriter
from lightning_trainer.gateway.request.pending import PendingCall
from lightning_trainer.reasons.call_errors import CUT

logger = masking_logger(__name__)


class CallRecord:
    """Keeps the record of one call, once.

    Args:
        writer: writes it.
        metrics: count it.
        attempt_id: of the attempt that made the call; None: it was made outside of one.
        live: how calls with a caller's key are sampled and masked.
    """

    def __init__(self, writer: RecordWriter, metrics: Metrics, attempt_id: str | None, live: Live) -> None:
        self.attempt_id = attempt_id
        self._writer = writer
        self._metrics = metrics
        self._live = live
        self.begun = False  # whether the record is being kept, or has been
        self.keeps = True  # False: the call is answered and counted, but not recorded

    async def record(self, pending: PendingCall, error: str | None = None) -> None:
        """Keep a call; return when it is on disk.

        Raises:
            Refusal: the store does not accept it.
        """
        self.begun = True
        call = pending.finish(error)
        try:
            if self.is_stored(pending):
                stored = self.mask(call)
                self._metrics.live_call("redacted", int(stored is not call))
                await self._writer.call(stored)
            else:
                self._metrics.live_call("sampled_out", int(self.keeps))
        except Exception as problem:
            raise store_down(problem) from problem
        self._metrics.call(call)

    async def cut(self, pending: PendingCall, error: str) -> None:
        """Keep a call that was cut off, unless it is kept already.

        The client is not there to get an error of the store.
        """
        if not self.begun:
            pending.note(**{CUT: True})
            try:
                await self.record(pending, error)
            except Refusal as refusal:
                logger.error("a call of attempt %s was not recorded: %s", pending.requested.grant.attempt_id, refusal)

    async def refused(self, pending: PendingCall, error: Exception) -> Refusal:
        """Keep a call that is rejected or failed; return the error for the client."""
        if isinstance(error, StoreError):
            error = store_down(error)
        if not isinstance(error, Refusal):
            logger.exception("a call failed", exc_info=error)
            error = Refusal(500, f"the gateway failed: {type(error).__name__}: {error}", "server_error")
        if not self.begun:
            pending.note(error={"status": error.status, "type": error.kind, "code": error.code})
            try:
                await self.record(pending, str(error))
            except Refusal as refusal:
                return refusal
        return error

    def cancelled(self, pending: PendingCall) -> None:
        """Keep a call that ends because the server stops."""
        if not self.begun:
            self.begun = True
            if self.is_stored(pending):
                self._writer.call_later(self.mask(pending.finish("the server stopped")))

    def is_stored(self, pending: PendingCall) -> bool:
        """Whether the call is recorded. Live ones are sampled by their trace, as spans are."""
        requested = pending.requested
        return self.keeps and (
            not requested.grant.is_live or is_sampled(requested.trace_id or pending.call_id, self._live.rate)
        )

    def mask(self, call: Call) -> Call:
        """Return the record of a call to store: of production, masked. Those of attempts are trained on."""
        return call if call.attempt_id is not None or call.origin == TRAINING else self._live.redaction.mask_call(call)
