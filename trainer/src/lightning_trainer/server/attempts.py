"""Which attempts have ended, so that their keys stop working. Asked at every request, so it seldom asks the store."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from lightning_spans.store import Store

_REMEMBERED: Final = 20_000  # attempts; older ones are asked of the store again


class EndedAttempts:
    """Remembers what ended here at once, and asks the store about the others every few seconds."""

    def __init__(self, store: Store, *, recheck_s: float = 5.0) -> None:
        self._store = store
        self._recheck_s = recheck_s
        self._ended: OrderedDict[str, float] = OrderedDict()
        self._running: OrderedDict[str, float] = OrderedDict()

    def started(self, attempt_ids: Sequence[str]) -> None:
        """Note attempts that the store has just started."""
        for attempt_id in attempt_ids:
            _note(self._running, attempt_id, time.monotonic())

    def ended(self, attempt_id: str, at_s: float | None = None) -> None:
        """Note that an attempt has ended, at a Unix time in seconds; now by default."""
        _note(self._ended, attempt_id, time.time() if at_s is None else at_s)

    async def ended_at(self, attempt_id: str) -> float | None:
        """Say when an attempt ended, in Unix seconds; None while it runs.

        An attempt that another process ended is noticed after a few seconds.

        Raises:
            StoreError: the store can't be asked.
        """
        if (at_s := self._ended.get(attempt_id)) is not None:
            return at_s
        if time.monotonic() - self._running.get(attempt_id, float("-inf")) < self._recheck_s:
            return None
        _note(self._running, attempt_id, time.monotonic())  # before asking: requests at once ask once
        records = await asyncio.to_thread(self._store.attempts, attempt_ids=[attempt_id])
        if records and records[0].status != "running":
            self.ended(attempt_id, (records[0].ended_ns or time.time_ns()) / 1e9)
        return self._ended.get(attempt_id)


def _note(table: OrderedDict[str, float], attempt_id: str, value: float) -> None:
    table[attempt_id] = value
    table.move_to_end(attempt_id)
    while len(table) > _REMEMBERED:
        table.popitem(last=False)
