"""Tables of the SQL store: each column is declared once here. Numbered migrations bring older files to this schema.

Times are Unix nanoseconds. A column has the name of its record's field, and its type says how `rows` writes and reads
it. Token ids are int32 and log-probabilities float64, little-endian, in blobs. float64, although engines compute in
float32: a number that arrived as JSON decimals then reads back as the same number, bit for bit, for four more bytes per
token next to kilobytes of request.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Double,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
    func,
    insert,
    inspect,
    select,
    text,
)

from lightning_spans.errors import StoreError

VERSION: Final = 7

metadata = MetaData()
_TRAINING: Final = text("'training'")  # the origin of rows that were written before origins existed
_SERIAL = BigInteger().with_variant(Integer, "sqlite")  # SQLite counts up only in a column typed INTEGER


class FreeText(Text):
    """Text that anybody wrote: what databases cannot store becomes its escape. An id is plain `Text`, and rejected."""


class JsonObject(Text):
    """A JSON object, as text."""


class LazyJsonObject(JsonObject):
    """A JSON object that is parsed when it is used."""


class ReplayRecord(Text):
    """A `Replay` as JSON."""


class TokenIds(LargeBinary):
    """int32, little-endian."""


class LogProbs(LargeBinary):
    """float64, little-endian."""


schema_version = Table(
    "schema_version",
    metadata,
    Column("version", Integer, primary_key=True, autoincrement=False),
    Column("applied_ns", BigInteger, nullable=False),
)

spans = Table(
    "spans",
    metadata,
    Column("seq", _SERIAL, primary_key=True),  # order of arrival
    Column("trace_id", Text, nullable=False),
    Column("span_id", Text, nullable=False),
    Column("parent_id", Text),
    Column("operation", FreeText, nullable=False),
    Column("name", FreeText, nullable=False),
    Column("agent", FreeText),
    Column("rollout_id", Text),
    Column("attempt_id", Text),
    Column("start_ns", BigInteger, nullable=False),
    Column("end_ns", BigInteger, nullable=False),
    Column("status", Text, nullable=False),
    Column("status_message", FreeText, nullable=False),
    Column("attributes", JsonObject, nullable=False),
    Column("origin", FreeText, nullable=False, server_default=_TRAINING),
)
# Unique within the attempt: knowing or guessing a span's ids does not allow replacing it in another attempt.
Index("spans_by_id", spans.c.trace_id, spans.c.span_id, func.coalesce(spans.c.attempt_id, text("''")), unique=True)

calls = Table(
    "calls",
    metadata,
    Column("seq", _SERIAL, primary_key=True),
    Column("call_id", Text, nullable=False, unique=True),
    Column("response_id", Text, nullable=False),
    Column("trace_id", Text, index=True),
    Column("span_id", Text),
    Column("rollout_id", Text),
    Column("attempt_id", Text),
    Column("agent", FreeText),
    Column("policy", Text, nullable=False),
    Column("policy_version", BigInteger, nullable=False),
    Column("start_ns", BigInteger, nullable=False),
    Column("end_ns", BigInteger, nullable=False),
    Column("error", FreeText),
    Column("prompt_token_ids", TokenIds),  # (P,)
    Column("request", LazyJsonObject, nullable=False),
    Column("sampling", JsonObject, nullable=False),
    Column("origin", FreeText, nullable=False, server_default=_TRAINING),
)

choices = Table(
    "choices",
    metadata,
    Column("call_id", Text, primary_key=True),
    Column("position", Integer, primary_key=True, autoincrement=False),  # position in Call.choices
    Column("choice_index", Integer, nullable=False, key="index"),
    Column("token_ids", TokenIds),  # (A,)
    Column("logprobs", LogProbs),  # (A,)
    Column("finish_reason", Text),
    Column("message", LazyJsonObject, nullable=False),
)

rewards = Table(
    "rewards",
    metadata,
    Column("seq", _SERIAL, primary_key=True),
    Column("reward_id", Text, nullable=False, unique=True),
    Column("rollout_id", Text, nullable=False),
    Column("attempt_id", Text, nullable=False),
    Column("value", Double, nullable=False),
    Column("agent", FreeText),
    Column("span_id", Text),
    Column("source", FreeText, nullable=False),
    Column("given_ns", BigInteger),
    Column("choice", Integer),
)

rollouts = Table(
    "rollouts",
    metadata,
    Column("seq", _SERIAL, primary_key=True),  # order of the queue
    Column("rollout_id", Text, nullable=False, unique=True),
    Column("group_id", Text, nullable=False, index=True),
    Column("task", JsonObject, nullable=False),
    Column("mode", Text, nullable=False),
    Column("max_attempts", Integer, nullable=False),
    Column("timeout_s", Double),
    Column("status", Text, nullable=False),
    Column("tries", Integer, nullable=False),  # attempts begun so far
    Column("queued_ns", BigInteger, nullable=False),
    Column("origin", FreeText, nullable=False, server_default=_TRAINING),
    Column("replay", ReplayRecord),
)

attempts = Table(
    "attempts",
    metadata,
    # The fencing number is the row's own: AUTOINCREMENT and identity columns only count up, whatever is deleted.
    Column("fence", _SERIAL, primary_key=True),
    Column("attempt_id", Text, nullable=False, unique=True),
    Column("rollout_id", Text, nullable=False, index=True),
    Column("number", Integer, nullable=False),
    Column("worker", Text, nullable=False),
    Column("status", Text, nullable=False),
    Column("lease_until_ns", BigInteger, nullable=False),
    Column("started_ns", BigInteger, nullable=False),
    Column("ended_ns", BigInteger),
    Column("error", FreeText),
    sqlite_autoincrement=True,
)

deployments = Table(
    "deployments",
    metadata,
    Column("seq", _SERIAL, primary_key=True),
    Column("agent", FreeText, nullable=False),
    Column("number", Integer, nullable=False),
    Column("stage", Text, nullable=False),
    Column("stable", FreeText, nullable=False),
    Column("candidate", FreeText),
    Column("previous", FreeText),
    Column("share", Double, nullable=False),
    Column("checkpoint", FreeText),
    Column("base", FreeText),
    Column("reason", FreeText, nullable=False),
    Column("actor", FreeText, nullable=False),
    Column("at_ns", BigInteger, nullable=False),
    Column("details", JsonObject, nullable=False),
    UniqueConstraint("agent", "number"),
)

assignments = Table(
    "assignments",
    metadata,
    Column("seq", _SERIAL, primary_key=True),
    Column("agent", FreeText, nullable=False),
    Column("attempt_id", Text, nullable=False),
    Column("policy", FreeText, nullable=False),
    Column("number", Integer, nullable=False),  # of the deployment
    Column("at_ns", BigInteger, nullable=False),
    UniqueConstraint("attempt_id", "agent"),
)

consumed_groups = Table(
    "consumed_groups",
    metadata,
    Column("group_id", Text, primary_key=True),
    Column("consumer", Text, nullable=False),
    Column("consumed_ns", BigInteger, nullable=False),
)

lease_clock = Table(
    "lease_clock",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("now_ns", BigInteger, nullable=False),
    Column("wrote_ns", BigInteger, nullable=False, server_default=text("0")),  # by the clock that `LeaseClock` compares
)


def _partial(name: str, column: Column[Any], condition: str) -> None:
    Index(name, column, sqlite_where=text(condition), postgresql_where=text(condition))


for _table in (spans, calls, rewards):  # rows outside a runner are not in these
    for _name in ("rollout_id", "attempt_id"):
        _partial(f"{_table.name}_by_{_name}", _table.c[_name], f"{_name} IS NOT NULL")
# SQLite uses these two only if a query spells the condition out: a bound parameter proves nothing to its planner.
QUEUED: Final = text("rollouts.status = 'queued'")
RUNNING: Final = text("attempts.status = 'running'")
_partial("rollouts_queued", rollouts.c.seq, "status = 'queued'")
_partial("attempts_running", attempts.c.lease_until_ns, "status = 'running'")

# Origins other than training's have an index, in the order of the pages; training, whose records are found by rollout
# and attempt, needs none.
NOT_TRAINING: Final = {table.name: text(f"{table.name}.origin <> 'training'") for table in (spans, calls)}
for _table in (spans, calls):
    _condition = text("origin <> 'training'")
    Index(
        f"{_table.name}_by_origin",
        _table.c.origin,
        _table.c.seq,
        sqlite_where=_condition,
        postgresql_where=_condition,
    )

Migration: TypeAlias = Callable[[Connection], None]


def _add_origins(connection: Connection) -> None:
    """Version 2: origins, and what the lease clock needs to cope with clocks that jump.

    A migration spells out its statements, independent of the tables above, which continue to change.
    """
    for table in ("spans", "calls", "rollouts"):
        connection.execute(text(f"ALTER TABLE {table} ADD COLUMN origin TEXT NOT NULL DEFAULT 'training'"))
    for table in ("spans", "calls"):
        connection.execute(
            text(f"CREATE INDEX {table}_by_origin ON {table} (origin, start_ns) WHERE origin <> 'training'")
        )
    connection.execute(text("ALTER TABLE lease_clock ADD COLUMN wrote_ns BIGINT NOT NULL DEFAULT 0"))


def _tell_attempts_apart(connection: Connection) -> None:
    """Version 3: a span is unique within its attempt, not in the whole store."""
    connection.execute(text("DROP INDEX spans_by_id"))
    connection.execute(text("CREATE UNIQUE INDEX spans_by_id ON spans (trace_id, span_id, coalesce(attempt_id, ''))"))


def _add_times_of_rewards(connection: Connection) -> None:
    """Version 4.

    A reward given during its attempt has a time, and one for one of several answers has the answer's index.
    """
    connection.execute(text("ALTER TABLE rewards ADD COLUMN given_ns BIGINT"))
    connection.execute(text("ALTER TABLE rewards ADD COLUMN choice INTEGER"))


def _add_replays(connection: Connection) -> None:
    """Version 5: a rollout may replay an earlier attempt."""
    connection.execute(text("ALTER TABLE rollouts ADD COLUMN replay TEXT"))


def _add_deployments(connection: Connection) -> None:
    """Version 6: which policy answers an agent in production, and which policy each conversation got."""
    sqlite = connection.dialect.name == "sqlite"
    seq = "INTEGER" if sqlite else "BIGSERIAL"
    share = "DOUBLE" if sqlite else "DOUBLE PRECISION"
    connection.execute(
        text(
            f"CREATE TABLE deployments (seq {seq} NOT NULL, agent TEXT NOT NULL, number INTEGER NOT NULL,"
            f" stage TEXT NOT NULL, stable TEXT NOT NULL, candidate TEXT, previous TEXT, share {share} NOT NULL,"
            " checkpoint TEXT, base TEXT, reason TEXT NOT NULL, actor TEXT NOT NULL, at_ns BIGINT NOT NULL,"
            " details TEXT NOT NULL, PRIMARY KEY (seq), UNIQUE (agent, number))"
        )
    )
    connection.execute(
        text(
            f"CREATE TABLE assignments (seq {seq} NOT NULL, agent TEXT NOT NULL, attempt_id TEXT NOT NULL,"
            " policy TEXT NOT NULL, number INTEGER NOT NULL, at_ns BIGINT NOT NULL, PRIMARY KEY (seq),"
            " UNIQUE (attempt_id, agent))"
        )
    )


def _order_origins_by_arrival(connection: Connection) -> None:
    """Version 7: a page of an origin is read from the index, without sorting all that come after it."""
    for table in ("spans", "calls"):
        connection.execute(text(f"DROP INDEX {table}_by_origin"))
        connection.execute(text(f"CREATE INDEX {table}_by_origin ON {table} (origin, seq) WHERE origin <> 'training'"))


MIGRATIONS: Final[Mapping[int, Migration]] = {
    2: _add_origins,
    3: _tell_attempts_apart,
    4: _add_times_of_rewards,
    5: _add_replays,
    6: _add_deployments,
    7: _order_origins_by_arrival,
}
"""How to bring a file of version n-1 to version n, by n. New files are made at `VERSION` at once."""


def prepare(
    connection: Connection, *, version: int = VERSION, migrations: Mapping[int, Migration] = MIGRATIONS
) -> None:
    """Create the tables in an empty database, or migrate an older one, within the caller's transaction.

    Args:
        connection: in a transaction that excludes other writers.
        version: to reach.
        migrations: by the version they lead to.

    Raises:
        StoreError: the database is newer than `version`, or is not one of our stores.
    """
    there = inspect(connection).get_table_names()
    if not there:
        metadata.create_all(connection)
        connection.execute(insert(lease_clock).values(id=1, now_ns=time.time_ns(), wrote_ns=0))
        _stamp(connection, VERSION)
        found = VERSION
    elif schema_version.name not in there:
        raise StoreError(f"it has other tables ({', '.join(sorted(there)[:5])}) and is not a store of traces")
    else:
        found = max(connection.scalars(select(schema_version.c.version)), default=0)
    if found > version:
        raise StoreError(
            f"its schema is version {found}, and this lightning-spans knows up to {version}. Install the newer"
            " lightning-spans that wrote it, or use another file"
        )
    for number in range(found + 1, version + 1):
        migrations[number](connection)
        _stamp(connection, number)


def _stamp(connection: Connection, version: int) -> None:
    connection.execute(insert(schema_version).values(version=version, applied_ns=time.time_ns()))
