"""Marks in the store: the only thing that the viewer writes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any, Final

from sqlalchemy import Connection, delete, func, insert, inspect, select
from sqlalchemy.exc import SQLAlchemyError

from lightning_spans.errors import RefusedError, StoreError
from lightning_spans.schema.attempts import Rollout
from lightning_spans.schema.spans import Span
from lightning_spans.store.protocol import Where, whole_list
from lightning_spans.store.sql.opening import open_database
from lightning_trainer.kits.view.answers.marks import MarkChange, MarkRow
from lightning_trainer.kits.view.mark_table import PLACE, table
from lightning_trainer.kits.view.reader import StoreReader
from lightning_trainer.kits.view.reading.steps import tasks_and_rewards
from lightning_trainer.kits.view.reading.texts import legible
from lightning_trainer.kits.view.runs import Run

_MOST: Final = 10_000  # most marks in a store
_LONGEST: Final = {"comment": 4000, "author": 100, "attempt_id": 300, "span_id": 100}


def marks_of(reader: StoreReader, run: Run) -> list[MarkRow]:
    """Return the marks of a run, the newest first."""
    with reader.reading() as connection:
        if not inspect(connection).has_table(table.name):
            return []
        rows = connection.execute(select(table).order_by(table.c.marked_ns.desc())).mappings().all()
    # a trace outside of rollouts is shown with every run in its store
    marks = [_row(row) for row in rows if not row["rollout_id"] or row["rollout_id"].startswith(run.prefix)]
    known = tasks_and_rewards(reader, run, (mark.rollout_id for mark in marks if mark.rollout_id))
    found = ((mark, *known.get(mark.rollout_id, ("", None))) for mark in marks)
    return [replace(mark, task=task, reward=reward) for mark, task, reward in found]


def exported_marks(reader: StoreReader, run: Run) -> list[dict[str, Any]]:
    """Return the marks of a run as JSON objects, each with the whole task of its rollout."""
    marks = marks_of(reader, run)
    wanted = Where(rollout_ids=[mark.rollout_id for mark in marks if mark.rollout_id])
    tasks = {each.rollout_id: dict(each.task) for each in whole_list(reader, Rollout, wanted)}
    return [{**asdict(mark), "task": tasks.get(mark.rollout_id)} for mark in marks]


def _row(row: Any) -> MarkRow:
    values = {name: value for name, value in row.items() if name != "marked_ns"}
    return MarkRow(marked_s=row["marked_ns"] / 1e9, **values)


def change_mark(reader: StoreReader, run: Run, change: MarkChange) -> None:
    """Save a mark in place of the one on the same rollout, call or trace, or remove it.

    Raises:
        RefusedError: the store has no such rollout or trace, a text is too long, or there are too many marks.
        StoreError: the store cannot be written.
    """
    values = {name: _storable(getattr(change, name)) for name in (*PLACE, *_LONGEST)}
    for name, most in _LONGEST.items():
        if len(values[name]) > most:
            raise RefusedError(f"the {name} of a mark has {len(values[name])} characters; at most {most} are allowed")
    if change.marked:
        _refuse_unknown(reader, values["rollout_id"], values["trace_id"])
    place = [table.c[name] == values[name] for name in PLACE]
    with _write_transaction(run.store) as connection:
        connection.execute(delete(table).where(*place))
        if not change.marked:
            return
        if (connection.scalar(select(func.count()).select_from(table)) or 0) >= _MOST:
            raise RefusedError(f"the store already has {_MOST} marks. Remove some first")
        connection.execute(insert(table).values(marked_ns=time.time_ns(), **values))


def _storable(text: str) -> str:
    return str(legible(text)).replace("\0", "\\x00")


def _refuse_unknown(reader: StoreReader, rollout_id: str, trace_id: str) -> None:
    if bool(rollout_id) == bool(trace_id):
        raise RefusedError("a mark belongs to a rollout or a trace: give rollout_id or trace_id")
    where = Where(rollout_ids=[rollout_id]) if rollout_id else Where(trace_ids=[trace_id])
    if not reader.page(Rollout if rollout_id else Span, where, limit=1).records:
        raise RefusedError(
            f"there is no {'rollout' if rollout_id else 'trace'} {rollout_id or trace_id!r} in this store"
        )


@contextmanager
def _write_transaction(store: str) -> Iterator[Connection]:
    """Open a connection in a write transaction, with the table of marks.

    Raises:
        StoreError: the store cannot be written.
    """
    database = open_database(store if "://" in store else f"sqlite:///{store}", create=False)
    try:
        with database.writer() as connection, connection.begin():
            database.lock(connection)
            table.create(connection, checkfirst=True)
            yield connection
    except SQLAlchemyError as error:
        reason = str(getattr(error, "orig", None) or error).strip().rstrip(".")
        raise StoreError(f"the mark is not saved, because the store can't be written: {reason}") from error
    finally:
        database.close()
