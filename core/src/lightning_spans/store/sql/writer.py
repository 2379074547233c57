"""The writer of an SQL store: waiting writes share one transaction and one trip to the disk."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

from sqlalchemy import Connection
from sqlalchemy.exc import DataError, IntegrityError, InterfaceError, ProgrammingError, SQLAlchemyError

from lightning_spans.errors import LightningError, RefusedError, StoreError
from lightning_spans.store.commit import GroupCommit
from lightning_spans.store.sql.database import Database, pauses_s

A = TypeVar("A")
T = TypeVar("T")
RunAll: TypeAlias = Callable[[Connection, Sequence[A]], Sequence[T | Exception]]

_BAD_RECORD: Final = (DataError, IntegrityError, InterfaceError, ProgrammingError, OverflowError, UnicodeEncodeError)


class _Write:
    """One caller's write: run within a transaction, perhaps again in a later one."""

    __slots__ = ("answer", "item", "run_all")

    def __init__(self, run_all: RunAll[Any, Any], item: Any) -> None:
        self.run_all = run_all
        self.item = item
        self.answer: Any = None  # the caller's result once it is on disk, or the error to raise


class _Failure(NamedTuple):
    """Why a transaction was not committed. If it could not even begin, single writes cannot either."""

    error: Exception
    begun: bool


class Writer:
    """Runs writes, one transaction at a time, on its own thread. A failing write does not fail the others."""

    def __init__(self, database: Database) -> None:
        """Create a writer; its thread, with its own connection, starts with the first write."""
        self._database = database
        self._name = database.name
        self._connection: Connection | None = None
        self._commits: GroupCommit[_Write, Any] = GroupCommit(
            self._serve,
            name=f"lightning-store {database.name}",
            closed=f"store {database.name} is closed. Open it again to continue.",
            at_end=self._disconnect,
        )

    def do(self, run: Callable[[Connection], T]) -> T:
        """Run a write and wait until it is on disk. It may run twice, so it must change nothing but the database.

        Raises:
            StoreError: the store is closed, or the database rejected it.
        """

        def run_all(connection: Connection, _: Sequence[None]) -> list[T | Exception]:
            return [run(connection)]

        return self.do_together(run_all, None)

    def do_together(self, run_all: RunAll[A, T], item: A) -> T:
        """Run a write together with others by the same function, and wait until it is on disk.

        Args:
            run_all: returns a result for each of the items that it gets, or the error to raise for it; like all writes,
                it may run twice.
            item: this caller's.

        Raises:
            StoreError: the store is closed, or the database rejected it.
            Exception: returned by `run_all` for this item.
        """
        answer: T = self._commits.do(_Write(run_all, item))
        return answer

    @property
    def waiting(self) -> int:
        """How many are waiting for the next transaction."""
        return self._commits.gathered

    def close(self) -> None:
        """Finish earlier requests, then stop. Calling it again changes nothing."""
        self._commits.close()

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()

    def _serve(self, writes: Sequence[_Write]) -> list[Any]:
        try:
            if self._connection is None:
                self._connection = self._database.writer()
        except Exception as error:  # noqa: BLE001 - the callers get it
            return [self._explain_error(error)] * len(writes)
        self._commit(self._connection, writes)
        return [write.answer for write in writes]

    def _commit(self, connection: Connection, writes: Sequence[_Write]) -> None:
        """Run writes in one transaction, again if that may help, and store their results."""
        pauses = pauses_s()
        while (failure := self._run(connection, writes)) is not None:
            if self._database.transient(failure.error) and (pause_s := next(pauses, None)) is not None:
                time.sleep(pause_s)
            elif failure.begun and len(writes) > 1:
                for write in writes:  # separate transactions show which one failed
                    self._commit(connection, [write])
                return
            else:
                explained = self._explain_error(failure.error)
                for write in writes:
                    write.answer = explained
                return

    def _run(self, connection: Connection, writes: Sequence[_Write]) -> _Failure | None:
        """Run writes in one transaction. Returns why none of it is kept; None if it is."""
        begun = False
        together: dict[int, list[_Write]] = {}
        for write in writes:
            together.setdefault(id(write.run_all), []).append(write)
        try:
            with connection.begin():
                begun = True
                for some in together.values():
                    self._attempt(connection, some, alone=len(together) == 1)
        except Exception as error:  # noqa: BLE001 - the callers get it
            return _Failure(error, begun)
        return None

    def _attempt(self, connection: Connection, writes: Sequence[_Write], *, alone: bool) -> None:
        """Run the writes of one function; behind a savepoint if there are others."""
        items = [write.item for write in writes]
        if alone:
            _note(writes, writes[0].run_all(connection, items))
            return
        savepoint = connection.begin_nested()
        try:
            answers = writes[0].run_all(connection, items)
            savepoint.commit()
        except Exception as error:
            if self._database.transient(error) or len(writes) > 1:
                raise  # all are run again, those of one function each alone
            # This raises when the database has rolled the whole transaction back (disk full): then all are run again,
            # and nobody is told that a write is kept which is gone.
            savepoint.rollback()
            answers = [self._explain_error(error)]
        _note(writes, answers)

    def _explain_error(self, error: Exception) -> Exception:
        if isinstance(error, LightningError):
            return error
        reason = str(getattr(error, "orig", None) or error) if isinstance(error, SQLAlchemyError) else repr(error)
        kind = RefusedError if isinstance(error, _BAD_RECORD) else StoreError
        explained = kind(f"store {self._name} could not write: {reason}")
        explained.__cause__ = error
        return explained


def _note(writes: Sequence[_Write], answers: Sequence[Any]) -> None:
    for write, answer in zip(writes, answers, strict=True):
        write.answer = answer
