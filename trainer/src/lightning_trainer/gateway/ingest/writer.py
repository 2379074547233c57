"""Writes calls and spans of many requests together, with the store's group commit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

from lightning_spans.schema.calls import Call
from lightning_spans.schema.spans import Span
from lightning_spans.store import Store
from lightning_spans.store.commit import GroupCommit
from lightning_trainer.gateway.http.masking import masking_logger

logger = masking_logger(__name__)
_MOST_AT_ONCE: Final = 2000  # records in one transaction; SQLite is fastest at about 1,000
_GATHER_S: Final = 0.005  # at least, if others are expected
_MOST_GATHER_S: Final = 0.025  # for answers that take a model a hundred times as long
_GATHER_EACH_S: Final = 0.0003  # for each call in progress: the more there are, the more arrive in that time

_Records: TypeAlias = tuple[Callable[[Sequence[Any]], int], Sequence[Any]]


class RecordWriter:
    """Writes calls and spans from any event loop. When an `await` returns, the record is on disk.

    A transaction costs about 1 ms of CPU and 0.07 ms per call in it, so it is worth waiting briefly for more.
    """

    def __init__(self, store: Store, *, max_waiting_spans: int = 100_000) -> None:
        self._store = store
        self.last_error: Exception | None = None
        self._refused = 0  # writes since the last transaction began
        self.expected: Callable[[], int] = lambda: 0  # number of calls in progress; set by the gateway
        self._commits: GroupCommit[_Records, None] = GroupCommit(
            self._write_all,
            name="lightning-writer",
            closed="the server is stopping",
            most=_MOST_AT_ONCE,
            room=max_waiting_spans,
            expected=self._expected_records,
            gather_s=lambda: min(max(_GATHER_S, _GATHER_EACH_S * self.expected()), _MOST_GATHER_S),
        )

    async def call(self, call: Call) -> None:
        """Store one call. There is always room for one, because it cannot be sent again.

        Raises:
            Exception: raised by the store; the call is not kept.
        """
        await self._commits.wait((self._store.add_calls, [call]), size=0)

    def call_later(self, call: Call) -> None:
        """Store one call whose request cannot wait any more, because the server stops; `close` writes it."""
        self._commits.later((self._store.add_calls, [call]))

    async def spans(self, spans: Sequence[Span]) -> None:
        """Store spans.

        Raises:
            QueueFullError: too many are waiting.
            Exception: raised by the store; none of this batch is kept.
        """
        await self._commits.wait((self._store.add_spans, spans), size=len(spans))

    def close(self) -> None:
        """Write what is waiting, and stop. Later writes are rejected."""
        self._commits.close()

    def _expected_records(self) -> int:
        return self.expected()

    def _write_all(self, items: Sequence[_Records]) -> list[Exception | None]:
        errors: dict[int, Exception | None] = {}
        for write in (self._store.add_calls, self._store.add_spans):
            places = [place for place, (kind, _) in enumerate(items) if kind == write]
            error = self._write([items[place] for place in places])
            if error is None or len(places) == 1:
                errors |= dict.fromkeys(places, error)
            else:  # one invalid record must not fail the others' requests
                errors |= {place: self._write([items[place]]) for place in places}
        refused = sum(error is not None for error in errors.values())
        if self._refused and not refused:
            logger.warning("the store takes writes again; it refused %d", self._refused)
            self._refused = 0
        self._refused += refused
        return [errors[place] for place in range(len(items))]

    def _write(self, items: Sequence[_Records]) -> Exception | None:
        """Write records of one kind in one transaction. Returns why none of them is kept."""
        if not items:
            return None
        try:
            items[0][0]([record for _, records in items for record in records])
        except Exception as error:  # noqa: BLE001 - whatever it is, it is told to each request that waits
            if str(error) != str(self.last_error):  # a full disk rejects hundreds per minute, which are retried
                logger.warning("the store refused %d writes: %s: %s", len(items), type(error).__name__, error)
            self.last_error = error
            return error
        self.last_error = None
        return None
