"""Six small tables in SQLite, and questions about them with the query that answers each. All of it is made here."""

# ruff: noqa: S608 - the names in these queries are the tables' own

from __future__ import annotations

import functools
import itertools
import json
import random
import re
import sqlite3
from pathlib import Path

TABLES = {
    "singer": ("name", "country", "age"),
    "car": ("model", "maker", "price"),
    "student": ("name", "city", "score"),
    "book": ("title", "author", "pages"),
    "player": ("name", "team", "goals"),
    "film": ("title", "director", "year"),
}
VALUES = ["Red", "Blue", "Green", "Gold"]
ROWS, STEPS, MOST = 12, 100_000, 200
MOST_BYTES, MOST_OF_ALL = 10_000, 1_000_000  # of a value, and of all rows together
# What a query may do. Some pragmas would change limits of the whole process.
ALLOWED = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}


@functools.cache
def database() -> sqlite3.Connection:
    """The tables, in memory; queries can only read, and a query that takes too many steps or bytes is stopped."""
    connection = sqlite3.connect(":memory:", check_same_thread=False)
    draw = random.Random(5)
    for table, columns in TABLES.items():
        connection.execute(f"CREATE TABLE {table}({', '.join(columns)})")
        rows = [(f"{columns[0]}{row}", draw.choice(VALUES), draw.randint(10, 90)) for row in range(ROWS)]
        connection.executemany(f"INSERT INTO {table} VALUES (?, ?, ?)", rows)
    connection.commit()
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MOST_BYTES)
    connection.set_authorizer(lambda action, *_: sqlite3.SQLITE_OK if action in ALLOWED else sqlite3.SQLITE_DENY)
    return connection


class QueryError(Exception):
    """The query is none, or SQLite does not take it."""


def execute(text: str) -> list[str]:
    """Run the SELECT that a text begins with, and give its rows, sorted.

    Raises:
        QueryError: there is none, SQLite rejects it, or its rows are too large.
    """
    found = re.match(r"\s*(select\b[^;]*)(;|$)", text, re.DOTALL | re.IGNORECASE)
    if found is None:
        raise QueryError("not a SELECT query")
    connection, left = database(), iter(range(STEPS // 1000))
    connection.set_progress_handler(lambda: next(left, None) is None, 1000)
    try:
        rows, size = list[str](), 0
        for row in itertools.islice(connection.execute(found[1]), MOST):
            rows.append(str(row))
            size += len(rows[-1])
            if size > MOST_OF_ALL:
                raise QueryError(f"its rows have more than {MOST_OF_ALL:,} bytes")
        return sorted(rows)
    except (sqlite3.Error, MemoryError) as error:
        raise QueryError(str(error)) from error


def problem(draw: random.Random) -> dict[str, str]:
    """A question with its schema, and a query that answers it."""
    table = draw.choice(list(TABLES))
    a, b, c = TABLES[table]
    value, limit = draw.choice(VALUES), draw.randint(20, 80)
    question, query = draw.choice(
        [
            (f"How many {table}s are there?", f"SELECT count(*) FROM {table}"),
            (f"List the {a} of all {table}s.", f"SELECT {a} FROM {table}"),
            (f"What is the average {c} of {table}s?", f"SELECT avg({c}) FROM {table}"),
            (f"How many {table}s have {b} {value}?", f"SELECT count(*) FROM {table} WHERE {b} = '{value}'"),
            (f"What is the {a} of {table}s with {c} above {limit}?", f"SELECT {a} FROM {table} WHERE {c} > {limit}"),
            (f"What is the highest {c}?", f"SELECT max({c}) FROM {table}"),
            (f"List the different {b} values.", f"SELECT DISTINCT {b} FROM {table}"),
        ]
    )
    return {"question": f"Table {table}({a}, {b}, {c})\n{question}", "query": query}


def write(path: Path, *, seed: int, count: int, without: Path | None = None) -> Path:
    """Write problems, one a line, over the same six tables; none that stands in the file `without`."""
    draw, lines = random.Random(seed), list[str]()
    others = set(without.read_text().splitlines(keepends=True)) if without else set()
    while len(lines) < count:
        line = json.dumps(problem(draw)) + "\n"
        lines += [line] if line not in others else []
    path.write_text("".join(lines))
    return path


if __name__ == "__main__":
    held_out = write(Path("val.jsonl"), seed=12345, count=32)
    write(Path("train.jsonl"), seed=1, count=160, without=held_out)
