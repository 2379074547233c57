"""The queue of rollouts: claims with leases, ends, retries. Functions on a connection within a write transaction."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, Final, TypeAlias, TypeVar, get_args

from sqlalchemy import Connection, and_, bindparam, false, func, insert, or_, select, update

from lightning_spans.errors import LeaseLostError, LightningError, RefusedError
from lightning_spans.schema.attempts import (
    FAILED,
    UNCOUNTED,
    UNCOUNTED_MOST,
    AttemptRecord,
    AttemptStatus,
    End,
    Rollout,
    RolloutStatus,
)
from lightning_spans.store.protocol import check_rollouts
from lightning_spans.store.sql.database import POSTGRESQL, insert_new
from lightning_spans.store.sql.lease import LeaseClock
from lightning_spans.store.sql.rows import ATTEMPTS, ROLLOUTS, Values
from lightning_spans.store.sql.schema import QUEUED, RUNNING, attempts, consumed_groups, rewards, rollouts

T = TypeVar("T")
CHUNK: Final = 500  # ids in one statement: databases limit the parameters of a statement, some to 999

LEASE_RAN_OUT: Final = "there was no heartbeat before the lease ran out"
_END_STATUS: Final = frozenset(get_args(AttemptStatus)) - {"running"}


def chunks(items: Iterable[T], size: int = CHUNK) -> Iterator[list[T]]:
    """Split into lists of at most `size`."""
    rest = iter(items)
    while chunk := list(islice(rest, size)):
        yield chunk


# Statements for each attempt are built once, because building costs more than running.
_JOINED: Final = attempts.c.rollout_id == rollouts.c.rollout_id
ATTEMPT_ROWS: Final = select(*ATTEMPTS.columns, *ROLLOUTS.columns).join_from(attempts, rollouts, _JOINED)
_STANDING: Final = (
    select(*(attempts.c[name] for name in ("attempt_id", "fence", "status")))
    .add_columns(rollouts.c.rollout_id, rollouts.c.tries, rollouts.c.max_attempts)
    .add_columns(rollouts.c.status.label("rollout_status"))
    .join_from(attempts, rollouts, _JOINED)
    .where(attempts.c.attempt_id.in_(bindparam("ids", expanding=True)))
)
_END_ATTEMPT: Final = update(attempts).where(attempts.c.fence == bindparam("its_fence"))
# Rollouts are always locked before their attempts, which avoids deadlocks.
_LOCK_THEIR_ROLLOUTS: Final = (
    select(rollouts.c.seq)
    .where(
        rollouts.c.rollout_id.in_(
            select(attempts.c.rollout_id).where(attempts.c.attempt_id.in_(bindparam("ids", expanding=True)))
        )
    )
    .order_by(rollouts.c.seq)
    .with_for_update()
)


def enqueue(connection: Connection, new: Sequence[Rollout]) -> int:
    """Queue new rollouts.

    Raises:
        RefusedError: a rollout allows no attempt, or no time for one.
    """
    check_rollouts(new)
    now = time.time_ns()
    state = {"status": "queued", "tries": 0, "queued_ns": now}
    rows = [{**ROLLOUTS.values(rollout), **state} for rollout in new]
    return insert_new(connection, rollouts, rows) if rows else 0


def backlog(connection: Connection) -> tuple[int, float]:
    """Return how many rollouts wait to be claimed, and the seconds that the oldest of them has waited since queued."""
    count, oldest_ns = connection.execute(select(func.count(), func.min(rollouts.c.queued_ns)).where(QUEUED)).one()
    return count, 0.0 if oldest_ns is None else max(0.0, (time.time_ns() - oldest_ns) / 1e9)


def claim(
    connection: Connection,
    clock: LeaseClock,
    worker: str,
    *,
    limit: int,
    lease_s: float,
    within: Collection[str] | None,
) -> list[AttemptRecord]:
    """Begin attempts for the rollouts that have waited longest, among those whose id begins so; None: among all."""
    now = clock.tick(connection)
    expire(connection, now)
    waiting = connection.execute(
        select(rollouts.c.rollout_id, rollouts.c.tries)
        .where(QUEUED, *([] if within is None else [_begins(within)]))
        .order_by(rollouts.c.seq)
        .limit(max(0, limit))
        .with_for_update(skip_locked=True)  # for databases with row locks; SQLite has locked the file
    ).all()
    if not waiting:
        return []
    new = [
        {
            "attempt_id": f"{row.rollout_id}.{row.tries + 1}",
            "rollout_id": row.rollout_id,
            "number": row.tries + 1,
            "worker": worker,
            "status": "running",
            "lease_until_ns": now + _ns(lease_s),
            "started_ns": time.time_ns(),
        }
        for row in waiting
    ]
    connection.execute(insert(attempts), new)
    _set_rollouts(connection, [row.rollout_id for row in waiting], status="running", tries=rollouts.c.tries + 1)
    ids = [str(row["attempt_id"]) for row in new]
    query = ATTEMPT_ROWS.order_by(rollouts.c.seq)
    found = [row for chunk in chunks(ids) for row in connection.execute(query.where(_attempts_in(chunk)))]
    tried = [row.rollout_id for row in waiting if row.tries]
    disturbed, failures = _ends(connection, tried, ("disturbed",)), _ends(connection, tried, FAILED)
    claimed = [attempt_record(row) for row in found]
    return [
        replace(
            one, disturbed=disturbed.get(one.rollout.rollout_id, 0), failures=failures.get(one.rollout.rollout_id, 0)
        )
        for one in claimed
    ]


def _begins(beginnings: Collection[str]) -> Any:
    """Return the condition that a rollout's id begins with one of these. LIKE would ignore case."""
    by_length: dict[int, list[str]] = defaultdict(list)
    for each in beginnings:
        by_length[len(each)].append(each)
    cut = ((func.substr(rollouts.c.rollout_id, 1, length), some) for length, some in by_length.items())
    return or_(false(), *(start.in_(some) for start, some in cut))


def attempt_record(row: Sequence[Any]) -> AttemptRecord:
    """Read a row of `ATTEMPT_ROWS`: an attempt's columns, then its rollout's."""
    return ATTEMPTS.record(row, rollout=ROLLOUTS.record(row[len(ATTEMPTS.columns) :]))


def _ends(connection: Connection, rollout_ids: Sequence[str], kinds: Sequence[AttemptStatus]) -> dict[str, int]:
    """Count the attempts of each rollout with this end."""
    counts: dict[str, int] = {}
    for chunk in chunks(rollout_ids):
        query = select(attempts.c.rollout_id, func.count()).where(
            attempts.c.rollout_id.in_(chunk), attempts.c.status.in_(kinds)
        )
        counts |= {row[0]: row[1] for row in connection.execute(query.group_by(attempts.c.rollout_id))}
    return counts


def _tries_left(connection: Connection, rows: Sequence[Any]) -> set[str]:
    """Return the rollouts, given as rows with tries and max_attempts, that may be retried."""
    spent = [row.rollout_id for row in rows if row.tries >= row.max_attempts]
    free = _ends(connection, spent, UNCOUNTED)
    counted = {row.rollout_id: row.tries - min(free.get(row.rollout_id, 0), UNCOUNTED_MOST) for row in rows}
    return {row.rollout_id for row in rows if counted[row.rollout_id] < row.max_attempts}


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


def _attempts_in(ids: Collection[str]) -> Any:
    return attempts.c.attempt_id.in_(ids)


def _set_rollouts(connection: Connection, ids: Iterable[str], **values: Any) -> None:
    for chunk in chunks(ids):
        connection.execute(update(rollouts).where(rollouts.c.rollout_id.in_(chunk)).values(**values))


def _lock_rollouts(connection: Connection, rollout_ids: Collection[str]) -> None:
    """Wait for others who change these rollouts, and keep them out. SQLite has locked the file already."""
    if connection.dialect.name == POSTGRESQL:
        query = select(rollouts.c.seq).where(rollouts.c.rollout_id.in_(rollout_ids)).order_by(rollouts.c.seq)
        connection.execute(query.with_for_update())


def any_expired(connection: Connection, now: int) -> bool:
    """Whether a running attempt's lease has expired."""
    query = select(attempts.c.fence).where(RUNNING, attempts.c.lease_until_ns < now).limit(1)
    return connection.scalar(query) is not None


def expire(connection: Connection, now: int) -> None:
    """Mark attempts whose lease has expired as lost.

    Retry their rollouts, or fail them if their attempts are used up.
    """
    late = connection.execute(
        select(attempts.c.attempt_id, rollouts.c.rollout_id, rollouts.c.tries, rollouts.c.max_attempts)
        .join_from(attempts, rollouts, _JOINED)
        .where(RUNNING, attempts.c.lease_until_ns < now)
        .with_for_update(of=rollouts, skip_locked=True)  # a holder is about to end it, or settles it as we do
    ).all()
    if not late:
        return
    ended = {"status": "lost", "ended_ns": time.time_ns(), "error": LEASE_RAN_OUT}
    lost: set[str] = set()
    for chunk in chunks(row.attempt_id for row in late):  # checked again: a heartbeat may have come before our lock
        still = update(attempts).where(_attempts_in(chunk), RUNNING, attempts.c.lease_until_ns < now)
        lost.update(connection.scalars(still.values(**ended).returning(attempts.c.attempt_id)))
    late = [row for row in late if row.attempt_id in lost]
    again = _tries_left(connection, late)
    _set_rollouts(connection, again, status="queued")
    _set_rollouts(connection, {row.rollout_id for row in late} - again, status="failed")


def heartbeat(
    connection: Connection, clock: LeaseClock, leases: Sequence[tuple[str, int]], lease_s: float
) -> list[str]:
    """Renew leases and return the lost ones. One that has expired unnoticed is renewed."""
    now = clock.tick(connection)
    held: set[tuple[str, int]] = set()
    for chunk in chunks(dict.fromkeys(attempt_id for attempt_id, _ in leases)):
        query = select(attempts.c.attempt_id, attempts.c.fence).where(RUNNING, _attempts_in(chunk))
        held.update((row.attempt_id, row.fence) for row in connection.execute(query))
    kept = [fence for attempt_id, fence in leases if (attempt_id, fence) in held]
    for fences in chunks(kept):
        connection.execute(
            update(attempts).where(RUNNING, attempts.c.fence.in_(fences)).values(lease_until_ns=now + _ns(lease_s))
        )
    return [attempt_id for attempt_id, fence in leases if (attempt_id, fence) not in held]


Ends: TypeAlias = Sequence[tuple[End, Sequence[Values]]]
"""Ends with the rows of their rewards."""


def finish(connection: Connection, ends: Ends) -> list[RolloutStatus | LightningError]:
    """End attempts and keep their rewards. Returns for each the status of its rollout, or why it is rejected.

    A rejected end changes nothing, and does not affect the others.
    """
    standing = _read_attempts(connection, list(dict.fromkeys(end.attempt_id for end, _ in ends)))
    refusals: dict[int, LightningError] = {}
    accepted: dict[str, End] = {}
    earned: list[Values] = []
    for place, (end, its_rewards) in enumerate(ends):
        row: Any = standing.get(end.attempt_id)
        told = accepted.get(end.attempt_id)
        try:
            _check_end(end, row, told)
        except LightningError as error:
            refusals[place] = error
            continue
        if told is None and row.status == "running":
            accepted[end.attempt_id] = end
            earned += its_rewards
    stands = {row.rollout_id: row.rollout_status for row in standing.values()}
    stands |= _end(connection, list(accepted.values()), standing, earned)
    return [
        refusals[place] if place in refusals else stands[standing[end.attempt_id].rollout_id]
        for place, (end, _) in enumerate(ends)
    ]


def _read_attempts(connection: Connection, attempt_ids: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for ids in chunks(attempt_ids):
        if connection.dialect.name == POSTGRESQL:
            connection.execute(_LOCK_THEIR_ROLLOUTS, {"ids": ids})
        found |= {row.attempt_id: row for row in connection.execute(_STANDING, {"ids": ids})}
    return found


def _end(
    connection: Connection, ends: Sequence[End], standing: dict[str, Any], earned: Sequence[Values]
) -> dict[str, RolloutStatus]:
    """Write accepted ends. Returns the current status of their rollouts."""
    if not ends:
        return {}
    now = time.time_ns()
    connection.execute(
        _END_ATTEMPT, [{"its_fence": e.fence, "status": e.status, "ended_ns": now, "error": e.error} for e in ends]
    )
    if earned:
        insert_new(connection, rewards, earned)
    rows = {end.attempt_id: standing[end.attempt_id] for end in ends}
    final = ("succeeded", "cancelled")
    again = _tries_left(connection, [rows[end.attempt_id] for end in ends if end.status not in final])
    stands: dict[str, RolloutStatus] = {}
    for end in ends:
        rollout_id = rows[end.attempt_id].rollout_id
        stands[rollout_id] = _after(end.status, tries_left=rollout_id in again and not end.final)
    for status in set(stands.values()):
        _set_rollouts(connection, [one for one, stood in stands.items() if stood == status], status=status)
    return stands


def _check_end(end: End, row: Any, told: End | None) -> None:
    """Reject an impossible end.

    Args:
        end: the reported end.
        row: the state of the attempt and its rollout; None: there is no such attempt.
        told: the end reported for it earlier in the same transaction.
    """
    if row is None:
        raise RefusedError(f"there is no attempt {end.attempt_id}")
    if end.status not in _END_STATUS:
        raise RefusedError(f"an attempt ends as one of {', '.join(sorted(_END_STATUS))}, not as {end.status!r}")
    for reward in end.rewards:
        if (reward.attempt_id, reward.rollout_id) != (end.attempt_id, row.rollout_id):
            raise RefusedError(
                f"reward {reward.reward_id} belongs to attempt {reward.attempt_id} of rollout {reward.rollout_id},"
                f" and can't end attempt {end.attempt_id} of rollout {row.rollout_id}"
            )
    status = row.status if told is None else told.status
    if row.fence != end.fence or status not in ("running", end.status):
        raise LeaseLostError(
            f"attempt {end.attempt_id} (fence {end.fence}) is no longer yours: it is {status}, its fence {row.fence}."
            " Drop this result; a retry is a new attempt"
        )


def _after(status: AttemptStatus, *, tries_left: bool) -> RolloutStatus:
    if status == "succeeded":
        return "succeeded"
    if status == "cancelled":
        return "cancelled"
    return "queued" if tries_left else "failed"


def cancel(connection: Connection, rollout_ids: Sequence[str]) -> int:
    """Cancel what has not ended. Heartbeats of the running attempts then report a lost lease."""
    open_status = ("queued", "running")
    cancelled = 0
    for chunk in chunks(dict.fromkeys(rollout_ids)):
        _lock_rollouts(connection, chunk)
        connection.execute(
            update(attempts)
            .where(RUNNING, attempts.c.rollout_id.in_(chunk))
            .values(status="cancelled", ended_ns=time.time_ns())
        )
        cancelled += connection.execute(
            update(rollouts)
            .where(and_(rollouts.c.rollout_id.in_(chunk), rollouts.c.status.in_(open_status)))
            .values(status="cancelled")
        ).rowcount
    return cancelled


def consume_group(connection: Connection, group_id: str, consumer: str) -> bool:
    """Mark a group as trained on, unless another consumer was first."""
    row = {"group_id": group_id, "consumer": consumer, "consumed_ns": time.time_ns()}
    insert_new(connection, consumed_groups, [row])
    first = connection.scalar(select(consumed_groups.c.consumer).where(consumed_groups.c.group_id == group_id))
    return first == consumer
