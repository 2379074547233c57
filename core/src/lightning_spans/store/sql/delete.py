"""Deletion: ended rollouts with everything that belongs to them, and traces without a rollout."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, Table, delete, exists, func, select

from lightning_spans.store.deployments import copy_id
from lightning_spans.store.protocol import DeleteFilter, Ids
from lightning_spans.store.sql.queue import chunks
from lightning_spans.store.sql.schema import assignments, attempts, calls, choices, rewards, rollouts, spans

_ENDED: Final = ("succeeded", "failed", "cancelled")
_SCANNED: Final = 5_000  # rows searched in one transaction, so that others need not wait long


def parts_of(wanted: DeleteFilter) -> Iterator[tuple[Table, DeleteFilter]]:
    """Yield the tables to search, each with few enough ids for one statement."""
    loose = wanted.trace_ids is not None or wanted.call_ids is not None
    if not loose:
        for ids in _parts(wanted.rollout_ids):
            yield rollouts, replace(wanted, rollout_ids=ids)
    if wanted.rollout_ids is not None:
        return
    if wanted.trace_ids is not None or not loose:
        for ids in _parts(wanted.trace_ids):
            yield from ((table, replace(wanted, trace_ids=ids, call_ids=None)) for table in (spans, calls))
    if wanted.call_ids is not None:
        for ids in _parts(wanted.call_ids):
            yield calls, replace(wanted, trace_ids=None, call_ids=ids)


def _parts(ids: Ids) -> Iterable[Ids]:
    return [None] if ids is None else chunks(ids)


def delete_rollouts(connection: Connection, wanted: DeleteFilter, most: int) -> int:
    """Delete up to `most` ended rollouts, with their attempts, spans, calls and rewards.

    Returns:
        The number of rollouts, and of copies of their calls, which belong to no rollout.
    """
    last = select(func.max(attempts.c.ended_ns)).where(attempts.c.rollout_id == rollouts.c.rollout_id)
    ended_ns = func.coalesce(last.scalar_subquery(), rollouts.c.queued_ns)
    query = select(rollouts.c.rollout_id).where(rollouts.c.status.in_(_ENDED))
    if wanted.origin is not None:
        query = query.where(rollouts.c.origin == wanted.origin)
    if wanted.before_ns is not None:
        query = query.where(ended_ns < wanted.before_ns)
    if wanted.rollout_ids is not None:
        query = query.where(rollouts.c.rollout_id.in_(wanted.rollout_ids))
    ids = connection.scalars(query.limit(most).with_for_update(of=rollouts, skip_locked=True)).all()
    copies = 0
    for chunk in chunks(ids):
        of_calls = connection.scalars(select(calls.c.call_id).where(calls.c.rollout_id.in_(chunk))).all()
        copies += _delete_calls(connection, of_calls) - len(of_calls)
        of_attempts = select(attempts.c.attempt_id).where(attempts.c.rollout_id.in_(chunk))
        connection.execute(delete(assignments).where(assignments.c.attempt_id.in_(of_attempts)))
        for table in (spans, rewards, attempts, rollouts):
            connection.execute(delete(table).where(table.c.rollout_id.in_(chunk)))
    return len(ids) + copies


def delete_conversations(connection: Connection, before_ns: int) -> None:
    """Delete the assignments and rewards of conversations outside attempts that began before this Unix time."""
    of_attempt = exists().where(attempts.c.attempt_id == assignments.c.attempt_id)
    old = (assignments.c.at_ns < before_ns, ~of_attempt)
    of_conversation = rewards.c.attempt_id.in_(select(assignments.c.attempt_id).where(*old))
    of_rollout = exists().where(rollouts.c.rollout_id == rewards.c.rollout_id)
    given_before = rewards.c.given_ns < before_ns
    connection.execute(delete(rewards).where(of_conversation | given_before, ~of_rollout))
    connection.execute(delete(assignments).where(*old))


def delete_loose(connection: Connection, table: Table, wanted: DeleteFilter, after: int) -> tuple[int, int | None]:
    """Delete spans or calls that belong to no rollout, among the next few thousand rows.

    Args:
        connection: in a write transaction.
        table: `spans` or `calls`.
        wanted: what to delete.
        after: where to continue: the last `seq` that was searched; 0 at first.

    Returns:
        How many were deleted, and where to continue; None: there are no more.
    """
    if wanted.trace_ids is not None or wanted.call_ids is not None:  # few, and found by an index
        return _delete_found(connection, table, _loose(table, wanted)), None
    window = select(table.c.seq).where(table.c.seq > after).order_by(table.c.seq).limit(_SCANNED).subquery()
    until: int | None = connection.scalar(select(func.max(window.c.seq)))
    if until is None:
        return 0, None
    within = (table.c.seq > after, table.c.seq <= until)
    return _delete_found(connection, table, [*within, *_loose(table, wanted)]), until


def _delete_found(connection: Connection, table: Table, conditions: Sequence[ColumnElement[Any]]) -> int:
    if table is calls:
        return _delete_calls(connection, connection.scalars(select(calls.c.call_id).where(*conditions)).all())
    found = connection.scalars(select(spans.c.seq).where(*conditions)).all()
    return sum(connection.execute(delete(spans).where(spans.c.seq.in_(chunk))).rowcount for chunk in chunks(found))


def _delete_calls(connection: Connection, call_ids: Sequence[str]) -> int:
    """Delete calls with their choices, and the candidates' answers to copies of them. Returns the number of calls."""
    gone = 0
    for chunk in chunks([*call_ids, *map(copy_id, call_ids)]):
        connection.execute(delete(choices).where(choices.c.call_id.in_(chunk)))
        gone += connection.execute(delete(calls).where(calls.c.call_id.in_(chunk))).rowcount
    return gone


def _loose(table: Table, wanted: DeleteFilter) -> list[ColumnElement[Any]]:
    conditions: list[ColumnElement[Any]] = [
        ~exists().where(rollouts.c.rollout_id == table.c.rollout_id),
    ]
    if wanted.origin is not None:
        conditions.append(table.c.origin == wanted.origin)
    if wanted.before_ns is not None:
        conditions.append(table.c.end_ns < wanted.before_ns)
    if wanted.trace_ids is not None:
        conditions.append(table.c.trace_id.in_(wanted.trace_ids))
    if wanted.call_ids is not None:
        conditions.append(table.c.call_id.in_(wanted.call_ids))
    return conditions
