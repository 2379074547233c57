"""Group commit: callers that wait at the same time share one write to the disk, or one request to the server.

Threads wait with `do`, tasks of any event loop with `wait`. A single caller is served at once. If several came together
last time, or are known to be coming, the first waits a moment for the others: their answers were sent together, so they
are likely to come together again, and without that wait every second write would be nearly empty.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Final, Generic, TypeVar

from lightning_spans.errors import QueueFullError, StoreError

logger = logging.getLogger("lightning_spans")
A = TypeVar("A")
B = TypeVar("B")

_GATHER_S: Final = 0.002


class _Waiting:
    """A waiting caller: a thread, a task of a loop, or none."""

    __slots__ = ("answer", "item", "loop", "size", "task")

    def __init__(self, item: Any, size: int) -> None:
        self.item = item
        self.size = size
        self.answer: Future[Any] | None = None
        self.task: asyncio.Future[Any] | None = None
        self.loop: asyncio.AbstractEventLoop | None = None


class GroupCommit(Generic[A, B]):
    """Collects items from threads and event loops, and processes them together on its own thread.

    Args:
        do_all: processes several items, and returns for each, in order, a result or the error to raise for it. If it
            raises,
            all of them get the exception.
        name: of the thread.
        closed: the error message for callers after `close`.
        most: items, and size of items, in one batch.
        room: total size that may wait or be in progress; None: unlimited. An item of size 0 is always accepted.
        expected: how many more are known to be coming.
        gather_s: how long the first waits for those that came last time or are expected.
        at_end: called by the thread when it ends.
    """

    def __init__(
        self,
        do_all: Callable[[Sequence[A]], Sequence[B | Exception]],
        *,
        name: str,
        closed: str,
        most: int = 256,
        room: int | None = None,
        expected: Callable[[], int] = lambda: 0,
        gather_s: Callable[[], float] = lambda: _GATHER_S,
        at_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._do_all = do_all
        self._name = name
        self._closed_message = closed
        self._most = most
        self._room = room
        self._expected = expected
        self._gather_s = gather_s
        self._at_end = at_end
        self._changed = threading.Condition()
        self._waiting: list[_Waiting] = []
        self._size = 0  # of the waiting ones
        self._taking = 0  # size that waits or is in progress, and counted
        self._company = 1  # how many came together last time
        self._idle = True  # the thread waits for the first
        self._closed = False
        self._thread: threading.Thread | None = None

    def do(self, item: A, *, size: int = 1) -> B:
        """Process one item, with others if there are some, and wait for it.

        Raises:
            StoreError: this is closed.
            QueueFullError: there is no room.
            Exception: returned for this item by `do_all`, or raised by it.
        """
        waiting = _Waiting(item, size)
        waiting.answer = Future()
        self._put(waiting)
        answer: B = waiting.answer.result()
        return answer

    async def wait(self, item: A, *, size: int = 1) -> B:
        """Process one item, and wait for it in an event loop. If the caller is cancelled, it is processed anyway.

        Raises:
            StoreError: this is closed.
            QueueFullError: there is no room.
            Exception: returned for this item by `do_all`, or raised by it.
        """
        waiting = _Waiting(item, size)
        waiting.loop = asyncio.get_running_loop()
        waiting.task = waiting.loop.create_future()
        self._put(waiting)
        answer: B = await waiting.task
        return answer

    def later(self, item: A) -> None:
        """Process one item for which nobody waits; `close` waits for it.

        Raises:
            StoreError: this is closed.
        """
        self._put(_Waiting(item, 0))

    def close(self) -> None:
        """Process what is waiting, and stop. Calling it again changes nothing."""
        with self._changed:
            self._closed = True
            self._changed.notify()
            thread = self._thread
        if thread is not None:
            thread.join()

    @property
    def gathered(self) -> int:
        """How many are waiting to be processed."""
        return len(self._waiting)

    def _put(self, new: _Waiting) -> None:
        with self._changed:
            if self._closed:
                raise StoreError(self._closed_message)
            if self._room is not None and self._taking and new.size and self._taking + new.size > self._room:
                raise QueueFullError(f"{self._taking} records wait to be written")
            self._taking += new.size
            self._size += new.size
            self._waiting.append(new)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            elif self._idle or self._enough():  # woken for each, the thread would take the interpreter from the others
                self._idle = False
                self._changed.notify()

    def _enough(self) -> bool:
        return (
            self._closed
            or len(self._waiting) >= max(self._company, self._expected())
            or max(len(self._waiting), self._size) >= self._most
        )

    def _run(self) -> None:
        try:
            while batch := self._gather():
                self._serve(batch)
        finally:
            self._at_end()

    def _gather(self) -> list[_Waiting]:
        """Take the waiting items. Empty: it is time to stop."""
        with self._changed:
            self._idle = True
            self._changed.wait_for(lambda: self._waiting or self._closed)
            self._idle = False
            until = time.monotonic() + self._gather_s()
            while not self._enough() and (left := until - time.monotonic()) > 0:
                self._changed.wait(left)
            batch: list[_Waiting] = []
            size = 0
            for each in self._waiting[: self._most]:
                if batch and size + each.size > self._most:
                    break
                batch.append(each)
                size += each.size
            self._waiting = self._waiting[len(batch) :]
            self._size -= size
            self._company = len(batch)
            return batch

    def _serve(self, batch: Sequence[_Waiting]) -> None:
        try:
            answers = self._do_all([each.item for each in batch])
        except Exception as error:  # noqa: BLE001 - all who wait get it
            answers = [error] * len(batch)
        with self._changed:
            self._taking -= sum(each.size for each in batch)
        of_loops: defaultdict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Any], Any]]] = defaultdict(list)
        for each, answer in zip(batch, answers, strict=True):
            if each.answer is not None:
                _tell(each.answer, answer)
            elif each.loop is not None and each.task is not None:
                of_loops[each.loop].append((each.task, answer))
        for loop, told in of_loops.items():  # a loop is woken once for all of its tasks
            try:
                loop.call_soon_threadsafe(_tell_tasks, told)
            except RuntimeError:  # the loop is closed: the work is done, and nobody waits any more
                logger.info("a write ended after its event loop had stopped")


def _tell(future: Any, answer: Any) -> None:
    if isinstance(answer, Exception):
        future.set_exception(answer)
    else:
        future.set_result(answer)


def _tell_tasks(told: Sequence[tuple[asyncio.Future[Any], Any]]) -> None:
    for task, answer in told:
        if not task.done():  # done: the waiting caller was cancelled
            _tell(task, answer)
