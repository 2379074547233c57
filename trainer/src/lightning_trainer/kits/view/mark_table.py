"""The table of marks. The first mark creates it, so that stores without marks need no new version for them."""

from __future__ import annotations

from typing import Final

from sqlalchemy import BigInteger, Column, Connection, MetaData, Table, Text, func, inspect, select

PLACE: Final = ("rollout_id", "trace_id", "span_id")  # "" if there is none
table: Final = Table(
    "viewer_marks",
    MetaData(),
    *(Column(name, Text, primary_key=True) for name in PLACE),
    Column("attempt_id", Text, nullable=False),
    Column("comment", Text, nullable=False),
    Column("author", Text, nullable=False),
    Column("marked_ns", BigInteger, nullable=False),
)


def marks_version(connection: Connection) -> tuple[int, int]:
    """Return a value that changes with every mark that is saved or removed."""
    if not inspect(connection).has_table(table.name):
        return 0, 0
    number, newest = connection.execute(select(func.count(), func.max(table.c.marked_ns)).select_from(table)).one()
    return number, newest or 0
