"""Deletion: ended rollouts with everything that belongs to them, and traces without a rollout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, Table, delete, exists, func, select

from lightning_spans.store.sql.queue import chunks
from lightning_spans.store.sql.schema import assignments, attempts, calls, choices, rewards, rollouts, spans

_ENDED: Final = ("succeeded", "failed", "cancelled")
_SCANNED: Final = 5_000  # rows searched in one transaction, so that others need not wait long


@dataclass(frozen=True, slots=True)
class Doomed:
    """What to delete; None filters nothing.

    Attributes:
        rollout_ids: these rollouts, if they have ended.
        trace_ids: these traces, where they belong to no rollout.
        origin: of this origin.
        before_ns: what ended before this Unix time in nanoseconds.
    """

    rollout_ids: Sequence[str] | None = None
    trace_ids: Sequence[str] | None = None
    origin: str | None = None
    before_ns: int | None = None


def delete_rollouts(connection: Connection, doomed: Doomed, most: int) -> int:
    """Delete up to `most` ended rollouts, their attempts, spans, calls and rewards. Returns the number of rollouts."""
    last = select(func.max(attempts.c.ended_ns)).where(attempts.c.rollout_id == rollouts.c.rollout_id)
    ended_ns = func.coalesce(last.scalar_subquery(), rollouts.c.queued_ns)
    query = select(rollouts.c.rollout_id).where(rollouts.c.status.in_(_ENDED))
    if doomed.origin is not None:
        query = query.where(rollouts.c.origin == doomed.origin)
    if doomed.before_ns is not None:
        query = query.where(ended_ns < doomed.before_ns)
    if doomed.rollout_ids is not None:
        query = query.where(rollouts.c.rollout_id.in_(doomed.rollout_ids))
    ids = connection.scalars(query.limit(most).with_for_update(of=rollouts, skip_locked=True)).all()
    for chunk in chunks(ids):
        of_calls = select(calls.c.call_id).where(calls.c.rollout_id.in_(chunk))
        connection.execute(delete(choices).where(choices.c.call_id.in_(of_calls)))
        of_attempts = select(attempts.c.attempt_id).where(attempts.c.rollout_id.in_(chunk))
        connection.execute(delete(assignments).where(assignments.c.attempt_id.in_(of_attempts)))
        for table in (calls, spans, rewards, attempts, rollouts):
            connection.execute(delete(table).where(table.c.rollout_id.in_(chunk)))
    return len(ids)


def delete_assignments(connection: Connection, before_ns: int) -> None:
    """Delete the assignments of conversations outside attempts that began before this Unix time in nanoseconds."""
    of_attempt = exists().where(attempts.c.attempt_id == assignments.c.attempt_id)
    connection.execute(delete(assignments).where(assignments.c.at_ns < before_ns, ~of_attempt))


def delete_loose(connection: Connection, table: Table, doomed: Doomed, after: int) -> tuple[int, int | None]:
    """Delete spans or calls that belong to no rollout, among the next few thousand rows.

    Args:
        connection: in a write transaction.
        table: `spans` or `calls`.
        doomed: what to delete.
        after: where to go on: the last `seq` that was looked at; 0 at first.

    Returns:
        How many were deleted, and where to go on; None: there are no more.
    """
    window = select(table.c.seq).where(table.c.seq > after).order_by(table.c.seq).limit(_SCANNED).subquery()
    until: int | None = connection.scalar(select(func.max(window.c.seq)))
    if until is None:
        return 0, None
    gone = 0
    found = connection.scalars(
        select(table.c.seq).where(table.c.seq > after, table.c.seq <= until, *_loose(table, doomed))
    ).all()
    for chunk in chunks(found):
        if table is calls:
            of_calls = select(calls.c.call_id).where(calls.c.seq.in_(chunk))
            connection.execute(delete(choices).where(choices.c.call_id.in_(of_calls)))
        gone += connection.execute(delete(table).where(table.c.seq.in_(chunk))).rowcount
    return gone, until


def _loose(table: Table, doomed: Doomed) -> list[ColumnElement[Any]]:
    conditions: list[ColumnElement[Any]] = [
        ~exists().where(rollouts.c.rollout_id == table.c.rollout_id),
    ]
    if doomed.origin is not None:
        conditions.append(table.c.origin == doomed.origin)
    if doomed.before_ns is not None:
        conditions.append(table.c.end_ns < doomed.before_ns)
    if doomed.trace_ids is not None:
        conditions.append(table.c.trace_id.in_(doomed.trace_ids))
    return conditions
