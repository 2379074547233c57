"""Group commit: many requests wait, one thread writes what all of them brought in one transaction.

Requests gather on the event loop, and the thread is woken once for all of them: woken for each, it would take the
interpreter from the loop each time.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from lightning_spans.errors import StoreError
from lightning_spans.spans import Span
from lightning_spans.store import Call, Store

logger = logging.getLogger(__name__)
_MOST_AT_ONCE: Final = 2000  # records in one transaction; SQLite's best rate is reached at about 1,000
_GATHER_S: Final = 0.005  # at least, where others are expected
_MOST_GATHER_S: Final = 0.025  # of answers that take a model a hundred times as long
_GATHER_EACH_S: Final = 0.0003  # for each call that is being answered: the more there are, the more come in that time

Write: TypeAlias = Callable[[Sequence[Any]], int]


class QueueFullError(StoreError):
    """More spans wait to be written than the limit allows."""


@dataclass(slots=True)
class _Item:
    write: Write
    records: Sequence[Any]
    waiter: asyncio.Future[None] | None
    loop: asyncio.AbstractEventLoop | None
    error: Exception | None = field(default=None)


class Writer:
    """Writes calls and spans from any event loop. What `await` returns from is on disk."""

    def __init__(self, store: Store, *, max_waiting_spans: int = 100_000) -> None:
        self._store = store
        self._max_waiting_spans = max_waiting_spans
        self._waiting_spans = 0
        self._queue: queue.SimpleQueue[list[_Item] | None] = queue.SimpleQueue()
        self._gathered: list[_Item] = []
        self._timed: set[asyncio.AbstractEventLoop] = set()  # that will hand over what gathers
        self._handed_over = 0  # times
        self._company = 1  # how many came together last time
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False
        self.last_error: Exception | None = None
        self.expected: Callable[[], int] = lambda: 0  # how many calls are being answered; told by the gateway

    async def call(self, call: Call) -> None:
        """Keep one call.

        Raises:
            Exception: whatever the store raised; the call is not kept.
        """
        await self._wait(self._store.add_calls, [call])

    def call_later(self, call: Call) -> None:
        """Keep one call whose request can't wait any more, because the server stops; `close` writes it."""
        self._put(_Item(self._store.add_calls, [call], None, None))

    async def spans(self, spans: Sequence[Span]) -> None:
        """Keep spans.

        Raises:
            QueueFullError: too many wait already.
            Exception: whatever the store raised; of this batch nothing is kept.
        """
        with self._lock:
            if self._waiting_spans + len(spans) > self._max_waiting_spans and self._waiting_spans:
                raise QueueFullError(f"{self._waiting_spans} spans wait to be written")
            self._waiting_spans += len(spans)
        await self._wait(self._store.add_spans, spans)

    async def _wait(self, write: Write, records: Sequence[Any]) -> None:
        loop = asyncio.get_running_loop()
        waiter = loop.create_future()
        self._put(_Item(write, records, waiter, loop))
        await waiter

    def _put(self, item: _Item) -> None:
        """Let it wait for company: for as many as came last time, or as are being answered now.

        Their senders were just answered, or will be soon; one call alone is written at once. A transaction costs about
        1 ms of CPU and 0.07 ms more for each call in it, so company is worth a short wait.
        """
        with self._lock:
            if self._closed:
                raise StoreError("the server is stopping")
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="lightning-writer", daemon=True)
                self._thread.start()
            self._gathered.append(item)
            expected = self.expected()
            many = sum(len(each.records) for each in self._gathered) >= _MOST_AT_ONCE
            if item.loop is None or many or len(self._gathered) >= max(self._company, expected):
                self._hand_over()
            elif item.loop not in self._timed:
                self._timed.add(item.loop)
                wait_s = min(max(_GATHER_S, _GATHER_EACH_S * expected), _MOST_GATHER_S)
                item.loop.call_later(wait_s, self._time_is_up, self._handed_over)

    def _time_is_up(self, handed_over: int) -> None:
        with self._lock:
            if handed_over == self._handed_over:  # else those whose time this was have gone
                self._hand_over()

    def _hand_over(self) -> None:
        if self._gathered:
            self._company = len(self._gathered)
            self._queue.put(self._gathered)
            self._gathered = []
        self._handed_over += 1
        self._timed.clear()

    def close(self) -> None:
        """Write what waits, and stop. Later writes are refused."""
        with self._lock:
            self._closed = True
            thread = self._thread
            self._hand_over()
            self._queue.put(None)
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while (items := self._queue.get()) is not None:
            size = sum(len(item.records) for item in items)
            while size < _MOST_AT_ONCE:  # what came while the last transaction was written
                try:
                    more = self._queue.get_nowait()
                except queue.Empty:
                    break
                if more is None:
                    self._queue.put(None)  # stop after these
                    break
                items = [*items, *more]
                size += sum(len(item.records) for item in more)
            self._commit(items)

    def _commit(self, items: list[_Item]) -> None:
        for write in (self._store.add_calls, self._store.add_spans):
            mine = [item for item in items if item.write == write]
            if mine and not self._try(mine) and len(mine) > 1:
                for item in mine:  # one bad record must not fail the others' requests
                    self._try([item])
        with self._lock:
            self._waiting_spans -= sum(len(i.records) for i in items if i.write == self._store.add_spans)
        for loop in {item.loop for item in items if item.loop is not None}:
            _wake(loop, [item for item in items if item.loop is loop])

    def _try(self, items: list[_Item]) -> bool:
        try:
            items[0].write([record for item in items for record in item.records])
        except Exception as error:  # noqa: BLE001 - whatever it is, it is told to each request that waits
            logger.warning("the store refused %d writes: %s: %s", len(items), type(error).__name__, error)
            self.last_error = error
            for item in items:
                item.error = error
            return False
        self.last_error = None
        for item in items:
            item.error = None
        return True


def _wake(loop: asyncio.AbstractEventLoop, items: list[_Item]) -> None:
    def tell() -> None:
        for item in items:
            if item.waiter is not None and not item.waiter.done():  # done: its request was cancelled
                if item.error is None:
                    item.waiter.set_result(None)
                else:
                    item.waiter.set_exception(item.error)

    try:
        loop.call_soon_threadsafe(tell)
    except RuntimeError:  # the loop is closed: the records are kept, and nobody waits any more
        logger.info("a write ended after its server had stopped")
