"""Pages of records: what to select for each kind, in the order of arrival, from where the previous page ended."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from sqlalchemy import ColumnElement, Connection, Select, String, Table, any_, bindparam, func, literal, select

from lightning_spans.schema.attempts import AttemptRecord, Rollout
from lightning_spans.schema.calls import Call, Choice
from lightning_spans.schema.json import dumps
from lightning_spans.schema.rewards import Reward
from lightning_spans.schema.spans import TRAINING, Span
from lightning_spans.store.deployments import Assignment, Deployment
from lightning_spans.store.protocol import Page, Where
from lightning_spans.store.sql import schema
from lightning_spans.store.sql.database import POSTGRESQL
from lightning_spans.store.sql.queue import ATTEMPT_ROWS, attempt_record
from lightning_spans.store.sql.rows import (
    ASSIGNMENTS,
    ATTEMPT_STATES,
    CALLS,
    CHOICES,
    DEPLOYMENTS,
    REWARDS,
    ROLLOUT_STATES,
    ROLLOUTS,
    SPANS,
    Rows,
)
from lightning_spans.store.states import AttemptState, RolloutState

R = TypeVar("R")
_PAGE_BYTES: Final = 8 << 20  # approximate size of the texts in a page: records are of any size, pages are not


@dataclass(frozen=True, slots=True)
class _Source:
    """The source of the records of a kind.

    Attributes:
        rows: selects them; a column that counts up is added at the end.
        seq: that column: the order of arrival.
        tables: whose columns the filters use, the first that has one of the name.
        records: reads the rows of a page.
    """

    rows: Select[Any]
    seq: ColumnElement[int]
    tables: tuple[Table, ...]
    records: Callable[[Connection, Sequence[Any]], list[Any]]


def _of(rows: Rows[Any], seq: str = "seq") -> _Source:
    def records(_: Connection, found: Sequence[Any]) -> list[Any]:
        return [rows.record(row) for row in found]

    return _Source(select(*rows.columns), rows.table.c[seq], (rows.table,), records)


def _calls(connection: Connection, found: Sequence[Any]) -> list[Call]:
    place = CALLS.columns.index(schema.calls.c.call_id)
    ids = [row[place] for row in found]
    query = select(schema.choices.c.call_id, *CHOICES.columns).where(among(connection, schema.choices.c.call_id, ids))
    choices: defaultdict[str, list[Choice]] = defaultdict(list)
    for row in connection.execute(query.order_by(schema.choices.c.call_id, schema.choices.c.position)):
        choices[row[0]].append(CHOICES.record(row[1:]))
    return [CALLS.record(row, choices=tuple(choices[row[place]])) for row in found]


def _attempts(_: Connection, found: Sequence[Any]) -> list[AttemptRecord]:
    return [attempt_record(row) for row in found]


_SOURCES: Final[Mapping[type[Any], _Source]] = {
    Span: _of(SPANS),
    Call: _Source(select(*CALLS.columns), schema.calls.c.seq, (schema.calls,), _calls),
    Reward: _of(REWARDS),
    Rollout: _of(ROLLOUTS),
    AttemptRecord: _Source(ATTEMPT_ROWS, schema.attempts.c.fence, (schema.attempts, schema.rollouts), _attempts),
    RolloutState: _of(ROLLOUT_STATES),
    AttemptState: _of(ATTEMPT_STATES, "fence"),
    Deployment: _of(DEPLOYMENTS),
    Assignment: _of(ASSIGNMENTS),
}


def read_page(
    connection: Connection, kind: type[R], where: Where, after: int, limit: int | None, *, newest_first: bool = False
) -> Page[R]:
    """Read records in the order of their arrival, or the reverse; see `Store.page`."""
    source = _SOURCES[kind]
    query = source.rows.add_columns(source.seq).where(*_conditions(connection, source, where))
    query = query.order_by(source.seq.desc() if newest_first else source.seq)
    if after:
        query = query.where(source.seq < after if newest_first else source.seq > after)
    if limit is None:
        return Page(source.records(connection, connection.execute(query).all()))
    streamed = connection.execute(query.limit(limit + 1).execution_options(stream_results=True))
    found, more = _take_page(streamed, limit, _large(source.rows))
    streamed.close()
    return Page(source.records(connection, found), found[-1][-1] if more else None)


def _large(query: Select[Any]) -> list[int]:
    """Return the positions of the columns whose values may be of any size."""
    kinds = (schema.JsonObject, schema.TokenIds, schema.LogProbs)
    return [place for place, column in enumerate(query.selected_columns) if isinstance(column.type, kinds)]


def _take_page(rows: Iterable[Any], limit: int, large: Sequence[int]) -> tuple[list[Any], bool]:
    """Take as many rows as fit into a page, and return whether there are more."""
    taken: list[Any] = []
    size = 0
    for row in rows:
        if len(taken) == limit or size > _PAGE_BYTES:
            return taken, True
        taken.append(row)
        for place in large:
            size += len(row[place] or ())
    return taken, False


def _conditions(connection: Connection, source: _Source, where: Where) -> list[ColumnElement[bool]]:
    conditions: list[ColumnElement[bool]] = []
    for name, wanted in where.given().items():
        key = name.removesuffix("s") if name.endswith("_ids") else name
        table = next(table for table in source.tables if key in table.c)
        column = table.c[key]
        if name.endswith("_ids"):
            conditions.append(among(connection, column, wanted))
            continue
        if name == "origin" and wanted != TRAINING and table.name in schema.NOT_TRAINING:
            # Written out, so that the index can be used.
            conditions.append(schema.NOT_TRAINING[table.name])  # type: ignore[arg-type]
        conditions.append(column == wanted)
    return conditions


def among(connection: Connection, column: ColumnElement[Any], ids: Sequence[str]) -> ColumnElement[bool]:
    """Return the condition that a column is one of any number of ids, which are sent as one parameter.

    Raises:
        UnicodeEncodeError: an id has half a character, which no database can store.
    """
    for one in ids:
        if not one.isascii():
            one.encode()
    wanted = list(dict.fromkeys(ids))
    if connection.dialect.name == POSTGRESQL:
        # Takes a tenth of `attach()`'s import time, and SQLite needs none of it.
        from sqlalchemy.dialects.postgresql import ARRAY

        return column == any_(bindparam(None, wanted, type_=ARRAY(String)))
    return column.in_(select(func.json_each(literal(dumps(wanted).decode(), String)).table_valued("value").c.value))
