"""What the SQL store needs to know about its database."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from sqlalchemy import Column, Connection, Engine, Executable, Table

from lightning_spans.schema.json import dumps

POSTGRESQL: Final = "postgresql"
SQLITE: Final = "sqlite"
_PATIENCE_S: Final = 10.0
_LONGEST_PAUSE_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Database:
    """An open database.

    Attributes:
        engine: returns connections to read on, each in a transaction that sees one moment.
        close: closes all connections and files.
        writer: opens a connection to write on. On SQLite its transactions exclude other writers from their beginning.
        lock: keeps others from creating or changing tables until the transaction ends.
        elapsing_ns: returns the reading of a clock that all users of the database read identically, in nanoseconds.
            Only
            differences over seconds are used; it may jump.
        after_delete: called when rows were deleted, outside transactions: removes what remains of them next to the
            tables.
        compact: rewrites the tables without what was deleted.
        error: what those two raise in addition to SQLAlchemy's errors.
        transient: whether an error says that the same transaction may succeed when it is run again.
        name: of the database, for messages; without its password.
        advice: what to check if it cannot be opened.
    """

    engine: Engine
    close: Callable[[], None]
    writer: Callable[[], Connection]
    lock: Callable[[Connection], None]
    elapsing_ns: Callable[[Connection], int]
    after_delete: Callable[[], None]
    compact: Callable[[], None]
    error: type[Exception]
    transient: Callable[[BaseException], bool]
    name: str
    advice: str


def pauses_s() -> Iterator[float]:
    """Return growing pauses between retries after a temporary failure, such as a restart; ten seconds in total."""
    until, pause_s = time.monotonic() + _PATIENCE_S, 0.02
    while time.monotonic() + pause_s < until:
        yield pause_s
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


INTO: Final = "lightning_into"
"""The execution option by which a database knows what is inserted: a table, and the names of its columns."""


def insert_new(connection: Connection, table: Table, rows: Sequence[Mapping[str, Any]]) -> int:
    """Insert rows with values for the same columns; existing ones are not changed.

    The driver gets the values directly: SQLAlchemy takes longer to process each of them than SQLite to write them.

    Returns:
        The number of new rows.
    """
    names = tuple(rows[0])
    into = (table, names)
    statement = _insert_statement(connection.dialect.name, *into)
    values = [tuple([row[name] for name in names]) for row in rows]
    options = {"preserve_rowcount": True, INTO: into}
    return connection.exec_driver_sql(statement, values, execution_options=options).rowcount


@cache
def _insert_statement(dialect: str, table: Table, names: Sequence[str]) -> str:
    columns = ", ".join(table.c[name].name for name in names)
    marks = ", ".join(["%s" if dialect == POSTGRESQL else "?"] * len(names))
    return f"INSERT INTO {table.name} ({columns}) VALUES ({marks}) ON CONFLICT DO NOTHING"  # noqa: S608 - our own names


def insert_new_ids(connection: Connection, key: Column[str], rows: Sequence[Mapping[str, Any]]) -> set[str]:
    """Insert rows; existing ones are not changed. Returns the keys of the new rows."""
    if connection.dialect.name == POSTGRESQL:
        return set(connection.scalars(_insert_returning(key), rows))
    # A transaction that writes to SQLite is exclusive: a row that does not exist now is new.
    ids = dumps([row[key.name] for row in rows]).decode()
    there = f"SELECT {key.name} FROM {key.table.name} WHERE {key.name} IN (SELECT value FROM json_each(?))"  # noqa: S608
    known = {found for (found,) in connection.exec_driver_sql(there, (ids,))}
    new = [row for row in rows if row[key.name] not in known]
    if new:
        insert_new(connection, key.table, new)
    return {row[key.name] for row in new}


@cache
def _insert_returning(key: Column[str]) -> Executable:
    from sqlalchemy.dialects.postgresql import insert

    return insert(key.table).on_conflict_do_nothing().returning(key)
