"""Group commit: one thread writes, and all who wait at the same time share one transaction and one trip to the disk."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final, NamedTuple, TypeVar

from sqlalchemy import Connection
from sqlalchemy.exc import DataError, IntegrityError, InterfaceError, ProgrammingError, SQLAlchemyError

from lightning_spans.errors import LightningError, RefusedError, StoreError
from lightning_spans.store_database import Database, pauses_s

logger = logging.getLogger("lightning_spans")
T = TypeVar("T")

_MOST: Final = 256  # writes in one transaction
_BAD_RECORD: Final = (DataError, IntegrityError, InterfaceError, ProgrammingError, OverflowError, UnicodeEncodeError)
_GATHER_S: Final = 0.002  # at most this long for those who were there last time


class _Write:
    """One caller's write: run inside a transaction, perhaps again in a later one, answered once it is on disk."""

    __slots__ = ("answer", "error", "result", "run")

    def __init__(self, run: Callable[[Connection], Any]) -> None:
        self.run = run
        self.answer: Future[Any] = Future()
        self.result: Any = None
        self.error: Exception | None = None

    def settle(self) -> None:
        """Tell the caller."""
        if self.error is None:
            self.answer.set_result(self.result)
        else:
            self.answer.set_exception(self.error)


class _Failure(NamedTuple):
    """Why a transaction was not committed. One that did not even begin will not begin for each write alone either."""

    error: Exception
    begun: bool


class Writer:
    """Runs writes one transaction at a time on a thread of its own. A write that fails does not fail its neighbours."""

    def __init__(self, database: Database) -> None:
        """Start the thread, which opens a connection of its own."""
        self._database = database
        self._name = database.name
        self._waiting: queue.SimpleQueue[_Write | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name=f"lightning-store {database.name}", daemon=True)
        self._thread.start()

    def do(self, run: Callable[[Connection], T]) -> T:
        """Run a write and wait until it is on disk. It may be run twice: it must not change anything but the database.

        Raises:
            StoreError: the store is closed, or the database refused.
        """
        write = _Write(run)
        with self._lock:
            if self._closed:
                raise StoreError(f"store {self._name} is closed. Open it again to go on.")
            self._waiting.put(write)
        result: T = write.answer.result()
        return result

    def close(self) -> None:
        """Finish what was asked for before, then stop. A second close changes nothing."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._waiting.put(None)
        self._thread.join()

    def _serve(self) -> None:
        company = 1
        try:
            with self._database.writer() as connection:
                while writes := self._gather(company):
                    self._commit(connection, writes)
                    company = len(writes)
        except Exception as error:
            logger.exception("lightning: the writer of store %s stopped", self._name)
            self._refuse_rest(error)

    def _gather(self, company: int) -> list[_Write]:
        """Take the writes that wait. Empty: it is time to stop.

        Those who shared the last transaction have just been answered and are likely to come again at once. Without a
        short wait for them the first to come would be written alone, and every second transaction would be near empty.
        """
        first = self._waiting.get()
        if first is None:
            return []
        writes = [first]
        until = time.monotonic() + _GATHER_S
        while len(writes) < _MOST:
            left = until - time.monotonic() if len(writes) < company else 0.0
            try:
                write = self._waiting.get(timeout=left) if left > 0 else self._waiting.get_nowait()
            except queue.Empty:
                break
            if write is None:
                self._waiting.put(None)  # stop after these
                break
            writes.append(write)
        return writes

    def _commit(self, connection: Connection, writes: list[_Write]) -> None:
        """Run writes in one transaction, again while that may help, and tell their callers."""
        pauses = pauses_s()
        while (failure := self._run(connection, writes)) is not None:
            if self._database.transient(failure.error) and (pause_s := next(pauses, None)) is not None:
                time.sleep(pause_s)
            elif failure.begun and len(writes) > 1:
                for write in writes:  # whose fault it was shows when each has a transaction of its own
                    self._commit(connection, [write])
                return
            else:
                for write in writes:
                    write.error = self._explained(failure.error)
                break
        for write in writes:
            write.settle()

    def _run(self, connection: Connection, writes: list[_Write]) -> _Failure | None:
        """Run writes in one transaction. Gives why nothing of it is kept; None when it is."""
        begun = False
        try:
            with connection.begin():
                begun = True
                for write in writes:
                    self._attempt(connection, write, alone=len(writes) == 1)
        except Exception as error:  # noqa: BLE001 - the callers get it
            return _Failure(error, begun)
        return None

    def _attempt(self, connection: Connection, write: _Write, *, alone: bool) -> None:
        """Run one write of the transaction; behind a savepoint where it has neighbours."""
        write.error = None
        if alone:
            write.result = write.run(connection)
            return
        savepoint = connection.begin_nested()
        try:
            write.result = write.run(connection)
            savepoint.commit()
        except Exception as error:
            if self._database.transient(error):
                raise  # all are run again
            # This raises when the database has rolled the whole transaction back (disk full): then all are run again,
            # and nobody is told that a write is kept which is gone.
            savepoint.rollback()
            write.error = self._explained(error)

    def _explained(self, error: Exception) -> Exception:
        if isinstance(error, LightningError):
            return error
        reason = str(getattr(error, "orig", None) or error) if isinstance(error, SQLAlchemyError) else repr(error)
        kind = RefusedError if isinstance(error, _BAD_RECORD) else StoreError
        explained = kind(f"store {self._name} could not write: {reason}")
        explained.__cause__ = error
        return explained

    def _refuse_rest(self, error: Exception) -> None:
        with self._lock:
            self._closed = True
        while True:
            try:
                write = self._waiting.get_nowait()
            except queue.Empty:
                return
            if write is not None:
                write.error = self._explained(error)
                write.settle()
