"""Spider's databases: read-only queries with a time limit, schemas for a small model, and the comparison of results."""

from __future__ import annotations

import itertools
import os
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TypeAlias

Rows: TypeAlias = list[tuple[object, ...]]

LIMIT_S = 2.0  # of one query
MOST_ROWS = 5000
STEPS = 10_000  # of SQLite's machine between two looks at the clock
MOST_BYTES = 20_000  # of a value
MOST_OF_ALL = 10_000_000  # bytes of all values together
# What a query may do. Some pragmas would change limits of the whole process.
ALLOWED = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}
PRAGMAS = {"table_info", "foreign_key_list"}


class QueryError(Exception):
    """SQLite's words about a query that it did not run."""


def folder() -> Path:
    """Return the folder with Spider: `LIGHTNING_DATA`/spider."""
    if not (root := os.environ.get("LIGHTNING_DATA")):
        raise SystemExit("LIGHTNING_DATA is not set: the folder that has spider/database and spider/train.jsonl.")
    return Path(root) / "spider"


def place(database: str) -> Path:
    """Return a database's file: ``NAME.sqlite``, or ``NAME/NAME.sqlite`` as Spider itself has it."""
    inside = folder() / "database"
    own = inside / database / f"{database}.sqlite"
    return own if own.exists() else inside / f"{database}.sqlite"


def execute(database: str, query: str) -> Rows:
    """Run a query that a model wrote: it can only read.

    Raises:
        QueryError: SQLite refused it, it took longer than `LIMIT_S`, or its rows are too large.
    """
    connection = sqlite3.connect(f"file:{place(database)}?mode=ro&immutable=1", uri=True)
    connection.set_authorizer(_permit)
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MOST_BYTES)
    connection.text_factory = lambda raw: raw.decode(errors="replace")
    until = time.monotonic() + LIMIT_S
    connection.set_progress_handler(lambda: time.monotonic() > until, STEPS)
    try:
        return _fetch(connection.execute(query))
    except (sqlite3.Error, sqlite3.Warning, ValueError, MemoryError) as error:  # ValueError: a zero character
        raise QueryError(str(error)) from None
    finally:
        connection.close()


def _permit(action: int, first: str | None, *_: str | None) -> int:
    allowed = action in ALLOWED or (action == sqlite3.SQLITE_PRAGMA and first in PRAGMAS)
    return sqlite3.SQLITE_OK if allowed else sqlite3.SQLITE_DENY


def _fetch(cursor: sqlite3.Cursor) -> Rows:
    rows, size = Rows(), 0
    for row in itertools.islice(cursor, MOST_ROWS):
        size += sum(len(value) if isinstance(value, str | bytes) else 8 for value in row)
        if size > MOST_OF_ALL:
            raise QueryError(f"its rows have more than {MOST_OF_ALL:,} bytes")
        rows.append(row)
    return rows


@cache
def schema(database: str) -> str:
    """Return the tables, a line each, ``name(column, ...)``, and after them which columns refer to which."""
    tables, links = [], []
    for (table,) in execute(database, "SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY rowid"):
        columns = [str(row[1]) for row in execute(database, f'PRAGMA table_info("{table}")')]
        tables.append(f"{table}({', '.join(columns)})")
        referring = execute(database, f'PRAGMA foreign_key_list("{table}")')
        links += [f"{table}.{row[3]} = {row[2]}.{row[4] or row[3]}" for row in referring]
    return "\n".join([*tables, *dict.fromkeys(links)])


def matches(database: str, query: str, gold: str) -> bool:
    """Whether a query gives what the right one gives: execution accuracy, as Spider's script with --keep_distinct.

    Values and duplicates count, the order of rows only where the right query orders them; columns may come in another
    order (as in the test-suite evaluation of Zhong et al., 2020, arXiv 2010.02840).
    """
    right = execute(database, gold)
    try:
        found = execute(database, query)
    except QueryError:
        return False
    if len(found) != len(right) or (right and len(found[0]) != len(right[0])):
        return False
    if not right:
        return True
    ordered = "order by" in gold.lower()
    width = len(right[0])
    columns = [Counter(column) for column in zip(*right, strict=True)]
    have = [Counter(column) for column in zip(*found, strict=True)]
    fits = [[at for at in range(width) if have[at] == column] for column in columns]
    for order in itertools.islice(_orders(fits), 1000):
        turned = [tuple(row[at] for at in order) for row in found]
        if turned == right if ordered else Counter(turned) == Counter(right):
            return True
    return False


def _orders(fits: list[list[int]], taken: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    """Give the orders of columns in which each stands at one of the places that fit, none twice."""
    if len(taken) == len(fits):
        yield taken
        return
    for at in fits[len(taken)]:
        if at not in taken:
            yield from _orders(fits, (*taken, at))
