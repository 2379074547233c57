"""The store in an SQL database, through SQLAlchemy Core."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeVar

from sqlalchemy import Connection, Table
from sqlalchemy.exc import SQLAlchemyError

from lightning_spans.errors import LightningError, RefusedError, StoreError
from lightning_spans.schema.attempts import AttemptRecord, AttemptStatus, End, Rollout, RolloutStatus
from lightning_spans.schema.calls import Call
from lightning_spans.schema.rewards import Reward, as_reward
from lightning_spans.schema.spans import Span
from lightning_spans.store.deployments import Assignment, Deployment
from lightning_spans.store.protocol import ANY, PAGE, DeleteFilter, Ids, Page, Store, Where, listing_of
from lightning_spans.store.sql import queue as q
from lightning_spans.store.sql import rows, schema
from lightning_spans.store.sql.database import insert_new, insert_new_ids, pauses_s
from lightning_spans.store.sql.delete import delete_conversations, delete_loose, delete_rollouts, parts_of
from lightning_spans.store.sql.lease import LeaseClock
from lightning_spans.store.sql.opening import open_database
from lightning_spans.store.sql.read import read_page
from lightning_spans.store.sql.writer import Writer
from lightning_spans.store.states import AttemptState, RolloutState

_DELETED_AT_ONCE: Final = 50  # rollouts in one transaction; others write in between

R = TypeVar("R")
T = TypeVar("T")


class SqlStore(Store):
    """A store in a SQLite file or in PostgreSQL, shared by any number of threads and processes.

    Writes go through one thread with group commit and return when they are on disk; reads use separate connections and
    see everything that was acknowledged before them. Leases run by `LeaseClock`; claiming, and reading rollouts or
    attempts, settles expired leases first.
    """

    def __init__(
        self,
        url: str,
        *,
        create: bool = True,
        version: int = schema.VERSION,
        migrations: Mapping[int, schema.Migration] = schema.MIGRATIONS,
    ) -> None:
        """Open a file, create its tables or migrate them.

        Args:
            url: ``sqlite:///path.db``.
            create: create the file if it does not exist.
            version: schema version to reach; another than the default only in tests of migrations.
            migrations: by the version they lead to.

        Raises:
            ConfigError: the URL names a database that this version does not support.
            StoreError: the file is missing, not a store, of a newer schema, or cannot be read or written.
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
            if isinstance(error, StoreError):  # it says itself what to do
                raise StoreError(f"store {self.name} can't be opened: {error}") from error
            reason = str(getattr(error, "orig", None) or error).strip().rstrip(".")
            raise StoreError(f"store {self.name} can't be opened: {reason}. {self._database.advice}") from error
        self._writer = Writer(self._database)

    def close(self) -> None:
        """Write what is pending and close the file. Calling it again changes nothing."""
        self._closed = True
        self._writer.close()
        self._database.close()

    def add_spans(self, spans: Sequence[Span]) -> int:
        """Keep spans. Existing ones are not changed."""
        return self._insert(schema.spans, rows.SPANS.values, spans)

    def add_calls(self, calls: Sequence[Call]) -> int:
        """Keep calls with their choices. Existing ones, and their choices, are not changed."""
        values = self._values(_call_values, calls)
        by_id: dict[str, tuple[rows.Values, list[rows.Values]]] = {}
        for call, choices in values:
            by_id.setdefault(call["call_id"], (call, choices))
        return self._writer.do(lambda connection: _insert_calls(connection, by_id)) if by_id else 0

    def add_rewards(self, rewards: Sequence[Reward]) -> int:
        """Keep rewards. Existing ones are not changed.

        Raises:
            RewardError: a value is not a finite number; none of them is kept.
        """
        return self._insert(schema.rewards, _reward_values, rewards)

    def add_deployments(self, deployments: Sequence[Deployment]) -> int:
        """Keep transitions. Existing ones are not changed."""
        return self._insert(schema.deployments, rows.DEPLOYMENTS.values, deployments)

    def add_assignments(self, assignments: Sequence[Assignment]) -> int:
        """Keep assignments. Existing ones are not changed."""
        return self._insert(schema.assignments, rows.ASSIGNMENTS.values, assignments)

    def page(
        self,
        kind: type[R],
        where: Where = ANY,
        *,
        after: int = 0,
        limit: int | None = PAGE,
        newest_first: bool = False,
    ) -> Page[R]:
        """Read some records, of one moment; see `Store.page`."""
        listing_of(kind, where)
        if kind in (Rollout, AttemptRecord, RolloutState, AttemptState):
            self._settle()
        return self._read(
            lambda connection: read_page(connection, kind, where, after, limit, newest_first=newest_first)
        )

    def enqueue(self, rollouts: Sequence[Rollout]) -> int:
        """Queue rollouts. Existing ones are not changed."""
        asked = list(rollouts)  # read twice, and again by the write
        return self._writer.do(lambda connection: q.enqueue(connection, asked))

    def backlog(self) -> tuple[int, float]:
        """Return how many rollouts wait to be claimed, and the seconds that the oldest of them has waited."""
        self._settle()
        return self._read(q.backlog)

    def claim(self, worker: str, *, limit: int = 1, lease_s: float = 60.0, within: Ids = None) -> list[AttemptRecord]:
        """Start attempts for up to `limit` rollouts, oldest first."""
        asked = None if within is None else list(within)  # it may be a generator, and the write may be repeated
        return self._writer.do(
            lambda connection: q.claim(connection, self._clock, worker, limit=limit, lease_s=lease_s, within=asked)
        )

    def heartbeat(self, leases: Sequence[tuple[str, int]], *, lease_s: float = 60.0) -> list[str]:
        """Renew leases; return the attempt ids whose lease is lost."""
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
        return self._writer.do_together(q.finish, (end, self._values(_reward_values, rewards)))

    def finish_all(self, ends: Sequence[End]) -> list[RolloutStatus | LightningError]:
        """End several attempts in one transaction."""
        good: list[tuple[End, Sequence[rows.Values]]] = []
        refused: dict[int, LightningError] = {}
        for place, end in enumerate(ends):
            try:
                good.append((end, self._values(_reward_values, end.rewards)))
            except LightningError as error:
                refused[place] = error
        told = iter(self._writer.do(lambda connection: q.finish(connection, good)) if good else ())
        return [refused[place] if place in refused else next(told) for place in range(len(ends))]

    def cancel(self, rollout_ids: Sequence[str]) -> int:
        """Cancel rollouts that have not ended."""
        return self._writer.do(lambda connection: q.cancel(connection, rollout_ids))

    def consume_group(self, group_id: str, consumer: str) -> bool:
        """Mark a group as trained on by `consumer`. False when another consumer had it."""
        return self._writer.do(lambda connection: q.consume_group(connection, group_id, consumer))

    def delete(
        self,
        *,
        rollout_ids: Ids = None,
        trace_ids: Ids = None,
        call_ids: Ids = None,
        origin: str | None = None,
        before_ns: int | None = None,
        compact: bool = False,
    ) -> int:
        """Delete what has ended, in many small transactions, between which others write.

        The space is used again; a SQLite file gets no smaller without `compact`.
        """
        wanted = DeleteFilter(rollout_ids, trace_ids, call_ids, origin, before_ns)
        wanted.check()
        deleted = 0
        for table, part in parts_of(wanted):
            deleted += self._delete_rollouts(part) if table is schema.rollouts else self._delete_loose(table, part)
        if wanted.is_by_age:
            self._writer.do(partial(delete_conversations, before_ns=before_ns or 0))
        if deleted or compact:
            self._clear_away(compact=compact)
        return deleted

    def _clear_away(self, *, compact: bool) -> None:
        try:
            if compact:
                self._database.compact()
            else:
                self._database.after_delete()
        except (SQLAlchemyError, self._database.error) as error:
            raise StoreError(f"store {self.name} deleted, but could not remove the remaining data: {error}") from error

    def _delete_rollouts(self, wanted: DeleteFilter) -> int:
        deleted = 0
        while some := self._writer.do(lambda connection: delete_rollouts(connection, wanted, _DELETED_AT_ONCE)):
            deleted += some
        return deleted

    def _delete_loose(self, table: Table, wanted: DeleteFilter) -> int:
        deleted, after = 0, 0
        while True:
            some, until = self._writer.do(partial(delete_loose, table=table, wanted=wanted, after=after))
            deleted += some
            if until is None:
                return deleted
            after = until

    def _settle(self) -> None:
        """Mark attempts with expired leases as lost even if nobody claims: their rollouts must not seem to run."""
        if self._read(lambda connection: q.any_expired(connection, self._clock.now(connection))):
            self._writer.do(lambda connection: q.expire(connection, self._clock.tick(connection)))

    def _values(self, values: Callable[[Any], T], records: Sequence[Any]) -> list[T]:
        """Convert records to rows in the caller's thread, so that an invalid one fails only its caller."""
        try:
            return [values(record) for record in records]
        except LightningError:
            raise
        except (TypeError, ValueError, OverflowError, AttributeError) as error:
            raise RefusedError(f"store {self.name} can't store this record: {error}") from error

    def _insert(self, table: Table, values: Callable[[Any], rows.Values], records: Sequence[Any]) -> int:
        new = self._values(values, records)
        return self._writer.do(lambda connection: insert_new(connection, table, new)) if new else 0

    def _read(self, read: Callable[[Connection], T]) -> T:
        if self._closed:
            raise StoreError(f"store {self.name} is closed. Open it again to continue.")
        pauses = pauses_s()
        while True:
            try:
                with self._engine.connect() as connection:
                    return read(connection)
            except (UnicodeEncodeError, OverflowError) as error:  # half a character, a number beyond 64 bits
                raise RefusedError(f"store {self.name} can't search: {error}") from None
            except SQLAlchemyError as error:
                if self._database.transient(error) and (pause_s := next(pauses, None)) is not None:
                    time.sleep(pause_s)
                    continue
                raise StoreError(
                    f"store {self.name} could not read: {getattr(error, 'orig', None) or error}"
                ) from error


def _call_values(call: Call) -> tuple[rows.Values, list[rows.Values]]:
    ids = ({"call_id": call.call_id, "position": position} for position in range(len(call.choices)))
    choices = [{**its, **rows.CHOICES.values(choice)} for its, choice in zip(ids, call.choices, strict=True)]
    return rows.CALLS.values(call), choices


def _reward_values(reward: Reward) -> rows.Values:
    return {**rows.REWARDS.values(reward), "value": as_reward(reward.value)}


def _insert_calls(connection: Connection, by_id: Mapping[str, tuple[rows.Values, list[rows.Values]]]) -> int:
    new = insert_new_ids(connection, schema.calls.c.call_id, [call for call, _ in by_id.values()])
    choices = [choice for call_id, (_, of_call) in by_id.items() if call_id in new for choice in of_call]
    if choices:
        insert_new(connection, schema.choices, choices)
    return len(new)
