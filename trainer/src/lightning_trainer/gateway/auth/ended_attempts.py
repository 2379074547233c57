"""Which attempts have ended, so that their keys stop working. Checked at every request, so it rarely asks the store."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from lightning_spans.schema.attempts import AttemptRecord
from lightning_spans.store import Store

RECHECK_S: Final = 1.0  # an end reported to another server is noticed within about this time
_REMEMBERED: Final = 20_000  # attempts; for older ones the store is asked again
_AT_ONCE: Final = 500  # ids in one query
LONG_AGO: Final = float("-inf")


@dataclass(frozen=True, slots=True)
class _Standing:
    """The last known state of an attempt.

    Attributes:
        fence: its fencing number; None if it ended before anyone asked.
        checked_s: monotonic time.
        ended_s: Unix time of its end; None while it is running.
    """

    fence: int | None
    checked_s: float
    ended_s: float | None = None


class EndedAttempts:
    """Knows immediately what ended here, and asks the store about the others every second, many in one query.

    An attempt is identified by its id and its fencing number: after a deletion another attempt may use the same id. One
    that the store does not know has ended. No request is permitted while the store is being asked.
    """

    def __init__(self, store: Store, *, recheck_s: float = RECHECK_S) -> None:
        self._store = store
        self._recheck_s = recheck_s
        self._known: OrderedDict[str, _Standing] = OrderedDict()
        self._asked: dict[str, Future[None]] = {}
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="lightning-attempts")

    def started(self, records: Iterable[AttemptRecord]) -> None:
        """Note attempts that the store has just started."""
        with self._lock:
            for record in records:
                self._note(record.attempt_id, _Standing(record.fence, time.monotonic()))

    def ended(self, attempt_id: str) -> None:
        """Note that an attempt has ended now."""
        with self._lock:
            known = self._known.get(attempt_id)
            if known is None or known.ended_s is None:
                fence = None if known is None else known.fence
                self._note(attempt_id, _Standing(fence, time.monotonic(), time.time()))

    async def ended_at(self, attempt_id: str, fence: int) -> float | None:
        """Return when the attempt with this id and fencing number ended, in Unix seconds; None while it is running.

        Raises:
            StoreError: the store cannot be asked.
        """
        with self._lock:
            known = self._known.get(attempt_id)
            if known is not None and known.fence is not None and known.fence > fence:
                return LONG_AGO
            fresh = known is not None and time.monotonic() - known.checked_s < self._recheck_s
            if known is not None and known.fence == fence and (fresh or known.ended_s is not None):
                return known.ended_s
            if known is not None and known.fence is None and fresh:
                return known.ended_s
            answer = self._ask(attempt_id)
        await asyncio.shield(asyncio.wrap_future(answer))  # others wait for the same answer
        with self._lock:
            known = self._known.get(attempt_id)
        return LONG_AGO if known is None or known.fence not in {fence, None} else known.ended_s

    def _ask(self, attempt_id: str) -> Future[None]:
        """Return a future that is done when the store has answered. Waiting queries are combined."""
        waiting = self._asked.get(attempt_id)
        if waiting is None:
            waiting = self._asked[attempt_id] = Future()
            self._thread.submit(self._answer)
        return waiting

    def _answer(self) -> None:
        with self._lock:
            asked = dict(list(self._asked.items())[:_AT_ONCE])
            self._asked = {name: future for name, future in self._asked.items() if name not in asked}
        if not asked:
            return
        asked_s = time.monotonic()
        try:
            found = {record.attempt_id: record for record in self._store.attempts(attempt_ids=list(asked))}
        except Exception as error:  # noqa: BLE001 - whatever it is, it is told to each request that waits
            for future in asked.values():
                future.set_exception(error)
            return
        with self._lock:
            for attempt_id in asked:
                self._take(attempt_id, found.get(attempt_id), asked_s)
        for future in asked.values():
            future.set_result(None)

    def _take(self, attempt_id: str, record: AttemptRecord | None, asked_s: float) -> None:
        """Apply the store's answer, unless an end was noted here after the query."""
        known = self._known.get(attempt_id)
        if known is not None and known.ended_s is not None and known.checked_s >= asked_s:
            return
        if record is None:
            self._note(attempt_id, _Standing(None, asked_s, LONG_AGO))
        elif record.status == "running":
            self._note(attempt_id, _Standing(record.fence, asked_s))
        else:
            self._note(attempt_id, _Standing(record.fence, asked_s, (record.ended_ns or time.time_ns()) / 1e9))

    def _note(self, attempt_id: str, standing: _Standing) -> None:
        self._known[attempt_id] = standing
        self._known.move_to_end(attempt_id)
        while len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
