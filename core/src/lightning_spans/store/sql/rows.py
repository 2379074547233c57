"""Converts rows of the SQL store to records and back, from the records' fields and the types of the tables' columns."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, Final, Generic, TypeAlias, TypeVar

from sqlalchemy import Column, Table

from lightning_spans.schema.attempts import AttemptRecord, Rollout
from lightning_spans.schema.calls import Call, Choice
from lightning_spans.schema.json import JsonText, dumps, field_types, from_json, loads, to_json
from lightning_spans.schema.replays import Replay
from lightning_spans.schema.rewards import Reward
from lightning_spans.schema.spans import Json, Span
from lightning_spans.store.deployments import Assignment, Deployment
from lightning_spans.store.sql import schema
from lightning_spans.store.states import AttemptState, RolloutState

Values: TypeAlias = dict[str, Any]
R = TypeVar("R")


def _text(value: str | None) -> str | None:
    """Return text that databases can store: a lone surrogate, as in half an emoji, and NUL become their escapes."""
    if value is None:
        return None
    if not value.isascii():
        value = value.encode("utf-8", "backslashreplace").decode()
    return value.replace("\0", "\\x00") if "\0" in value else value


def _json(value: Mapping[str, Json]) -> str:
    return dumps(value).decode() if value else "{}"


def _object(text: str) -> Any:
    return {} if text == "{}" else loads(text)


def _lazy(text: str) -> Mapping[str, Json]:
    return {} if text == "{}" else JsonText(text)


def _replay(replay: Replay | None) -> str | None:
    return None if replay is None else dumps(to_json(replay)).decode()


def _read_replay(text: str | None) -> Replay | None:
    return None if text is None else from_json(Replay, loads(text))


def _packer(code: str) -> Callable[[Sequence[float] | None], bytes | None]:
    def pack(values: Sequence[float] | None) -> bytes | None:
        if values is None:
            return None
        packed = array(code, values)
        if sys.byteorder == "big":
            packed.byteswap()
        return packed.tobytes()

    return pack


def _unpacker(code: str) -> Callable[[bytes | None], tuple[Any, ...] | None]:
    def unpack(blob: bytes | None) -> tuple[Any, ...] | None:
        if blob is None:
            return None
        packed = array(code)
        packed.frombytes(blob)
        if sys.byteorder == "big":
            packed.byteswap()
        return tuple(packed)

    return unpack


Convert: TypeAlias = Callable[[Any], Any]
_WRITE: Final[Mapping[type, Convert]] = {
    schema.FreeText: _text,
    schema.JsonObject: _json,
    schema.LazyJsonObject: _json,
    schema.ReplayRecord: _replay,
    schema.TokenIds: _packer("i"),
    schema.LogProbs: _packer("d"),
}
_READ: Final[Mapping[type, Convert]] = {
    schema.JsonObject: _object,
    schema.LazyJsonObject: _lazy,
    schema.ReplayRecord: _read_replay,
    schema.TokenIds: _unpacker("i"),
    schema.LogProbs: _unpacker("d"),
}


class Rows(Generic[R]):
    """The rows of one kind of record: each field that has a column of its name."""

    def __init__(self, kind: type[R], table: Table) -> None:
        """Find the columns.

        Args:
            kind: the record's class.
            table: their table.
        """
        self.table = table
        self._kind = kind
        self._names = tuple(name for name in field_types(kind) if name in table.c)
        self.columns: tuple[Column[Any], ...] = tuple(table.c[name] for name in self._names)
        """The columns that `record` reads, in their order."""
        self._fields = attrgetter(*self._names)
        self._write = self._converters(_WRITE)
        self._read = self._converters(_READ)

    def _converters(self, by_type: Mapping[type, Convert]) -> tuple[tuple[str, Convert], ...]:
        kinds = ((column.key, by_type.get(type(column.type))) for column in self.columns)
        return tuple((name, convert) for name, convert in kinds if convert is not None)

    def values(self, record: R) -> Values:
        """Return a record's row.

        Raises:
            TypeError: a field has another type than its column; ValueError and OverflowError likewise.
        """
        values: Values = dict(zip(self._names, self._fields(record), strict=True))
        for name, write in self._write:
            values[name] = write(values[name])
        return values

    def record(self, row: Sequence[Any], **others: Any) -> R:
        """Read a row.

        Args:
            row: begins with the values of `columns`.
            others: fields that have no column.
        """
        values: Values = dict(zip(self._names, row))  # noqa: B905 - what follows is not the record's
        for name, read in self._read:
            values[name] = read(values[name])
        return self._kind(**values, **others)


SPANS: Final = Rows(Span, schema.spans)
CALLS: Final = Rows(Call, schema.calls)
CHOICES: Final = Rows(Choice, schema.choices)
REWARDS: Final = Rows(Reward, schema.rewards)
ROLLOUTS: Final = Rows(Rollout, schema.rollouts)
ATTEMPTS: Final = Rows(AttemptRecord, schema.attempts)
ROLLOUT_STATES: Final = Rows(RolloutState, schema.rollouts)
ATTEMPT_STATES: Final = Rows(AttemptState, schema.attempts)
DEPLOYMENTS: Final = Rows(Deployment, schema.deployments)
ASSIGNMENTS: Final = Rows(Assignment, schema.assignments)
