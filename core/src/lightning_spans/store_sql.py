"""The store in an SQL database, through SQLAlchemy Core."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeVar

from sqlalchemy import Connection, Select, Table, select
from sqlalchemy.exc import SQLAlchemyError

from lightning_spans import store_queue as q
from lightning_spans import store_rows as rows
from lightning_spans import store_schema as schema
from lightning_spans.errors import LightningError, RefusedError, StoreError
from lightning_spans.rewards import Reward
from lightning_spans.spans import TRAINING, Span
from lightning_spans.store import AttemptRecord, AttemptStatus, Call, Choice, End, Rollout, RolloutStatus
from lightning_spans.store_database import insert_new, insert_new_ids, open_database, pauses_s
from lightning_spans.store_delete import Doomed, delete_loose, delete_rollouts
from lightning_spans.store_lease import LeaseClock
from lightning_spans.store_together import Together
from lightning_spans.store_writer import Writer

_DELETED_AT_ONCE: Final = 50  # rollouts in one transaction; others write in between

T = TypeVar("T")
Ids = Sequence[str] | None


class SqlStore:
    """A `Store` in a SQLite file, shared by any number of threads and processes.

    Writes go through one thread with group commit and return when they are on disk; reads use connections of their own
    and see everything that was acknowledged before them. Leases run by `store_queue.LeaseClock`; whoever claims or asks
    for rollouts or attempts first settles the leases that have run out.
    """

    def __init__(
        self,
        url: str,
        *,
        create: bool = True,
        version: int = schema.VERSION,
        migrations: Mapping[int, schema.Migration] = schema.MIGRATIONS,
    ) -> None:
        """Open a file, make its tables or bring them up to date.

        Args:
            url: ``sqlite:///path.db``.
            create: make the file where there is none.
            version: schema version to reach; another than the default only in tests of migrations.
            migrations: by the version they lead to.

        Raises:
            ConfigError: the URL is of a database that this version does not speak.
            StoreError: the file is missing, not a store, of a newer schema, or can't be read or written.
        """
        self._database = open_database(url, create=create)
        self._engine = self._database.engine
        self.name = self._database.name
        self._closed = False
        self._clock = LeaseClock(self._database)
        try:
            with self._database.writer() as connection, connection.begin():
                self._database.lock(connection)
                schema.prepare(connection, version=version, migrations=migrations)
        except (SQLAlchemyError, StoreError) as error:
            self._database.close()
            reason = error if isinstance(error, StoreError) else getattr(error, "orig", None) or error
            raise StoreError(f"store {self.name} can't be opened: {reason}") from error
        self._writer = Writer(self._database)
        self._ending: Together[tuple[End, Sequence[rows.Values]], RolloutStatus] = Together(self._finish)

    def close(self) -> None:
        """Write what is pending and let go of the file; a second close changes nothing."""
        self._closed = True
        self._writer.close()
        self._database.close()

    def add_spans(self, spans: Sequence[Span]) -> int:
        """Keep spans; one already there is left as it is."""
        return self._insert(schema.spans, rows.span_values, spans)

    def add_calls(self, calls: Sequence[Call]) -> int:
        """Keep calls with their choices; one already there is left as it is, its choices too."""
        values = self._values(lambda call: (rows.call_values(call), rows.choice_values(call)), calls)
        by_id: dict[str, tuple[rows.Values, list[rows.Values]]] = {}
        for call, choices in values:
            by_id.setdefault(call["call_id"], (call, choices))
        return self._writer.do(lambda connection: _insert_calls(connection, by_id)) if by_id else 0

    def add_rewards(self, rewards: Sequence[Reward]) -> int:
        """Keep rewards; one already there is left as it is.

        Raises:
            RewardError: a value is not a finite number; none of them is kept.
        """
        return self._insert(schema.rewards, rows.reward_values, rewards)

    def spans(
        self, *, rollout_ids: Ids = None, attempt_ids: Ids = None, trace_ids: Ids = None, origin: str | None = None
    ) -> list[Span]:
        """Give spans in the order of their start."""
        query = _of_origin(select(schema.spans), schema.spans, origin)
        filters = {"rollout_id": rollout_ids, "attempt_id": attempt_ids, "trace_id": trace_ids}
        found = self._read(lambda connection: _find(connection, query, schema.spans, filters))
        found.sort(key=lambda row: (row.start_ns, row.seq))
        return [rows.row_span(row) for row in found]

    def calls(
        self, *, rollout_ids: Ids = None, attempt_ids: Ids = None, trace_ids: Ids = None, origin: str | None = None
    ) -> list[Call]:
        """Give calls in the order of their start."""
        query = _of_origin(select(schema.calls), schema.calls, origin)
        filters = {"rollout_id": rollout_ids, "attempt_id": attempt_ids, "trace_id": trace_ids}
        found, choices = self._read(lambda connection: _find_calls(connection, query, filters))
        found.sort(key=lambda row: (row.start_ns, row.seq))
        return [rows.row_call(row, choices.get(row.call_id, ())) for row in found]

    def rewards(self, *, rollout_ids: Ids = None, attempt_ids: Ids = None) -> list[Reward]:
        """Give rewards in the order of their arrival."""
        filters = {"rollout_id": rollout_ids, "attempt_id": attempt_ids}
        found = self._read(lambda connection: _find(connection, select(schema.rewards), schema.rewards, filters))
        found.sort(key=lambda row: row.seq)
        return [rows.row_reward(row) for row in found]

    def enqueue(self, rollouts: Sequence[Rollout]) -> int:
        """Queue rollouts; one already there is left as it is."""
        return self._writer.do(lambda connection: q.enqueue(connection, rollouts))

    def claim(self, worker: str, *, limit: int = 1, lease_s: float = 60.0) -> list[AttemptRecord]:
        """Start attempts for up to `limit` rollouts, oldest first."""
        return self._writer.do(lambda connection: q.claim(connection, self._clock, worker, limit, lease_s))

    def heartbeat(self, leases: Sequence[tuple[str, int]], *, lease_s: float = 60.0) -> list[str]:
        """Renew leases; gives the attempt ids whose lease is lost."""
        return self._writer.do(lambda connection: q.heartbeat(connection, self._clock, leases, lease_s))

    def finish(
        self,
        attempt_id: str,
        fence: int,
        *,
        status: AttemptStatus,
        rewards: Sequence[Reward] = (),
        error: str | None = None,
    ) -> RolloutStatus:
        """End an attempt, with its rewards, in one transaction."""
        end = End(attempt_id, fence, status, tuple(rewards), error)
        return self._ending.do((end, self._values(rows.reward_values, rewards)))

    def finish_all(self, ends: Sequence[End]) -> list[RolloutStatus | LightningError]:
        """End several attempts in one transaction."""
        good: list[tuple[End, Sequence[rows.Values]]] = []
        refused: dict[int, LightningError] = {}
        for place, end in enumerate(ends):
            try:
                good.append((end, self._values(rows.reward_values, end.rewards)))
            except LightningError as error:
                refused[place] = error
        told = iter(self._finish(good) if good else ())
        return [refused[place] if place in refused else next(told) for place in range(len(ends))]

    def _finish(self, ends: q.Ends) -> list[RolloutStatus | LightningError]:
        return self._writer.do(lambda connection: q.finish(connection, ends))

    def cancel(self, rollout_ids: Sequence[str]) -> int:
        """Cancel rollouts that have not ended."""
        return self._writer.do(lambda connection: q.cancel(connection, rollout_ids))

    def rollouts(
        self,
        *,
        rollout_ids: Ids = None,
        group_ids: Ids = None,
        status: RolloutStatus | None = None,
        origin: str | None = None,
    ) -> list[Rollout]:
        """Give rollouts in the order they were queued."""
        self._settle()
        query = _of_origin(select(schema.rollouts), schema.rollouts, origin)
        if status is not None:
            query = query.where(schema.rollouts.c.status == status)
        filters = {"rollout_id": rollout_ids, "group_id": group_ids}
        found = self._read(lambda connection: _find(connection, query, schema.rollouts, filters))
        found.sort(key=lambda row: row.seq)
        return [rows.row_rollout(row) for row in found]

    def attempts(
        self, *, rollout_ids: Ids = None, attempt_ids: Ids = None, origin: str | None = None
    ) -> list[AttemptRecord]:
        """Give attempts in the order of their start."""
        self._settle()
        filters = {"rollout_id": rollout_ids, "attempt_id": attempt_ids}
        query = _of_origin(q.ATTEMPTS, schema.rollouts, origin)
        found = self._read(lambda connection: _find(connection, query, schema.attempts, filters))
        found.sort(key=lambda row: row.fence)
        return [rows.row_attempt(row) for row in found]

    def consume_group(self, group_id: str, consumer: str) -> bool:
        """Mark a group as trained on by `consumer`. False when another consumer had it."""
        return self._writer.do(lambda connection: q.consume_group(connection, group_id, consumer))

    def delete(
        self,
        *,
        rollout_ids: Ids = None,
        trace_ids: Ids = None,
        origin: str | None = None,
        before_ns: int | None = None,
    ) -> int:
        """Delete what has ended, in many small transactions, between which others write.

        The space is used again; a SQLite file gets no smaller by itself.
        """
        if all(given is None for given in (rollout_ids, trace_ids, origin, before_ns)):
            raise RefusedError("delete: say what: rollout_ids, trace_ids, an origin or a time")
        deleted = 0
        if trace_ids is None:
            for ids in q.chunks(rollout_ids) if rollout_ids is not None else [None]:
                deleted += self._delete_rollouts(Doomed(ids, None, origin, before_ns))
        if rollout_ids is None:
            for ids in q.chunks(trace_ids) if trace_ids is not None else [None]:
                for table in (schema.spans, schema.calls):
                    deleted += self._delete_loose(table, Doomed(None, ids, origin, before_ns))
        return deleted

    def _delete_rollouts(self, doomed: Doomed) -> int:
        deleted = 0
        while some := self._writer.do(lambda connection: delete_rollouts(connection, doomed, _DELETED_AT_ONCE)):
            deleted += some
        return deleted

    def _delete_loose(self, table: Table, doomed: Doomed) -> int:
        deleted, after = 0, 0
        while True:
            some, until = self._writer.do(partial(delete_loose, table=table, doomed=doomed, after=after))
            deleted += some
            if until is None:
                return deleted
            after = until

    def _settle(self) -> None:
        """Mark attempts as lost whose lease ran out, though nobody claims: their rollouts must not seem to run."""
        if self._read(lambda connection: q.any_expired(connection, self._clock.now(connection))):
            self._writer.do(lambda connection: q.expire(connection, self._clock.tick(connection)))

    def _values(self, values: Callable[[Any], T], records: Sequence[Any]) -> list[T]:
        """Turn records into rows in the caller's thread, so that a bad one fails its caller alone."""
        try:
            return [values(record) for record in records]
        except LightningError:
            raise
        except (TypeError, ValueError, OverflowError, AttributeError) as error:
            raise RefusedError(f"store {self.name} can't keep this record: {error}") from error

    def _insert(self, table: Table, values: Callable[[Any], rows.Values], records: Sequence[Any]) -> int:
        new = self._values(values, records)
        return self._writer.do(lambda connection: insert_new(connection, table, new)) if new else 0

    def _read(self, read: Callable[[Connection], T]) -> T:
        if self._closed:
            raise StoreError(f"store {self.name} is closed. Open it again to go on.")
        pauses = pauses_s()
        while True:
            try:
                with self._engine.connect() as connection:
                    return read(connection)
            except UnicodeEncodeError as error:  # half a character, which no database holds
                raise RefusedError(f"store {self.name} can't look for this: {error}") from None
            except SQLAlchemyError as error:
                if self._database.transient(error) and (pause_s := next(pauses, None)) is not None:
                    time.sleep(pause_s)
                    continue
                raise StoreError(
                    f"store {self.name} could not read: {getattr(error, 'orig', None) or error}"
                ) from error


def _insert_calls(connection: Connection, by_id: Mapping[str, tuple[rows.Values, list[rows.Values]]]) -> int:
    new = insert_new_ids(connection, schema.calls.c.call_id, [call for call, _ in by_id.values()])
    choices = [choice for call_id, (_, of_call) in by_id.items() if call_id in new for choice in of_call]
    if choices:
        connection.execute(schema.choices.insert(), choices)
    return len(new)


def _find(connection: Connection, query: Select[Any], table: Table, filters: Mapping[str, Ids]) -> list[Any]:
    """Run a query for rows whose columns are in the lists given, however long.

    The shortest list goes into the statement, in chunks; the others are applied to what comes back.
    """
    sets = ((name, set(ids)) for name, ids in filters.items() if ids is not None)
    given = sorted(sets, key=lambda item: len(item[1]))
    if not given:
        return list(connection.execute(query))
    (first, ids), others = given[0], given[1:]
    return [
        row
        for chunk in q.chunks(sorted(ids))
        for row in connection.execute(query.where(table.c[first].in_(chunk)))
        if all(getattr(row, name) in kept for name, kept in others)
    ]


def _of_origin(query: Select[Any], table: Table, origin: str | None) -> Select[Any]:
    if origin is None:
        return query
    if origin != TRAINING and table.name in schema.NOT_TRAINING:
        query = query.where(schema.NOT_TRAINING[table.name])  # written out, so that the index can be used
    return query.where(table.c.origin == origin)


def _find_calls(
    connection: Connection, wanted: Select[Any], filters: Mapping[str, Ids]
) -> tuple[list[Any], Mapping[str, Iterable[Choice]]]:
    found = _find(connection, wanted, schema.calls, filters)
    query = select(schema.choices).order_by(schema.choices.c.call_id, schema.choices.c.position)
    choices: defaultdict[str, list[Choice]] = defaultdict(list)
    everything = wanted.whereclause is None and all(ids is None for ids in filters.values())
    ids = None if everything else [row.call_id for row in found]
    for row in _find(connection, query, schema.choices, {"call_id": ids}):
        choices[row.call_id].append(rows.row_choice(row))
    return found, choices
