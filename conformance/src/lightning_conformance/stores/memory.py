"""A store in memory, for tests of code that uses one: as strict as the real ones, gone with the process, fast."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Final, TypeVar, cast, get_args

from lightning_spans.errors import LeaseLostError, LightningError, RefusedError, RewardError, StoreError
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
from lightning_spans.schema.calls import Call
from lightning_spans.schema.rewards import Reward, as_reward
from lightning_spans.schema.spans import Span
from lightning_spans.store.deployments import Assignment, Deployment, copy_id
from lightning_spans.store.protocol import ANY, PAGE, DeleteFilter, Ids, Page, Store, Where, check_rollouts, listing_of
from lightning_spans.store.states import AttemptState, RolloutState

R = TypeVar("R")

_ENDS: Final = frozenset(get_args(AttemptStatus)) - {"running"}
_OPEN: Final = ("queued", "running")


@dataclass
class _StoreContents:
    """The contents of a store, shared by all stores on the same data. Dicts keep the order of arrival."""

    spans: dict[tuple[str | None, str, str], Span] = field(default_factory=dict)
    calls: dict[str, Call] = field(default_factory=dict)
    rewards: dict[str, Reward] = field(default_factory=dict)
    deployments: dict[tuple[str, int], Deployment] = field(default_factory=dict)
    assignments: dict[tuple[str, str], Assignment] = field(default_factory=dict)
    rollouts: dict[str, Rollout] = field(default_factory=dict)
    attempts: dict[str, AttemptRecord] = field(default_factory=dict)
    consumed: dict[str, str] = field(default_factory=dict)
    arrived: dict[Any, int] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=lambda: count(1))
    fences: Iterator[int] = field(default_factory=lambda: count(1))
    lock: threading.RLock = field(default_factory=threading.RLock)

    def numbered(self, table: Mapping[Any, R]) -> Iterator[tuple[int, R]]:
        """Yield records with their number in the order of arrival, which a deletion does not change."""
        for key, record in table.items():
            yield self.arrived.setdefault((id(table), key), next(self.numbers)), record

    def now(self, record: Any) -> Any:
        """Return an attempt with the current state of its rollout; other records unchanged."""
        if not isinstance(record, AttemptRecord):
            return record
        return replace(record, rollout=self.rollouts[record.rollout.rollout_id], disturbed=0, failures=0)


def _rollout_state(rollout: Rollout) -> RolloutState:
    return RolloutState(rollout_id=rollout.rollout_id, group_id=rollout.group_id, status=rollout.status)


def _attempt_state(attempt: AttemptRecord) -> AttemptState:
    return AttemptState(
        attempt_id=attempt.attempt_id,
        rollout_id=attempt.rollout.rollout_id,
        worker=attempt.worker,
        status=attempt.status,
        started_ns=attempt.started_ns,
        error=attempt.error,
    )


_STATES: Final[Mapping[str, tuple[str, Callable[[Any], Any]]]] = {
    "rollout_states": ("rollouts", _rollout_state),
    "attempt_states": ("attempts", _attempt_state),
}


class MemoryStore(Store):
    """A store in memory: it keeps every promise except being on disk."""

    def __init__(self, *, on: MemoryStore | None = None) -> None:
        """Open a store.

        Args:
            on: another store to share data with, as two processes share a file; None: empty.
        """
        self._kept: _StoreContents = _StoreContents() if on is None else on._kept
        self._closed = False

    def close(self) -> None:
        """Refuse later calls; the data remain for the stores that share them."""
        self._closed = True

    def add_spans(self, spans: Sequence[Span]) -> int:
        """Add spans; existing ones stay unchanged."""
        return self._add(self._kept.spans, (((span.attempt_id, span.trace_id, span.span_id), span) for span in spans))

    def add_calls(self, calls: Sequence[Call]) -> int:
        """Add calls; existing ones stay unchanged."""
        return self._add(self._kept.calls, ((call.call_id, call) for call in calls))

    def add_rewards(self, rewards: Sequence[Reward]) -> int:
        """Add rewards; existing ones stay unchanged."""
        return self._add(self._kept.rewards, [(reward.reward_id, _finite(reward)) for reward in rewards])

    def add_deployments(self, deployments: Sequence[Deployment]) -> int:
        """Add transitions; existing ones stay unchanged."""
        return self._add(self._kept.deployments, (((one.agent, one.number), one) for one in deployments))

    def add_assignments(self, assignments: Sequence[Assignment]) -> int:
        """Add assignments; existing ones stay unchanged."""
        return self._add(self._kept.assignments, (((one.agent, one.attempt_id), one) for one in assignments))

    def page(
        self,
        kind: type[R],
        where: Where = ANY,
        *,
        after: int = 0,
        limit: int | None = PAGE,
        newest_first: bool = False,
    ) -> Page[R]:
        """Return a page of records in order of arrival, or in reverse."""
        what, _ = listing_of(kind, where)
        wanted = _record_filter(where)
        table, form = _STATES.get(what, (what, lambda record: record))
        with self._open() as kept:
            if table in ("rollouts", "attempts"):
                self._settle()
            found = [
                (number, form(kept.now(record)))
                for number, record in kept.numbered(getattr(kept, table))
                if (not after or (number < after if newest_first else number > after)) and wanted(kept.now(record))
            ]
        if newest_first:
            found.reverse()
        more = limit is not None and len(found) > limit
        found = found[:limit] if more else found
        return Page([cast(R, record) for _, record in found], found[-1][0] if more else None)

    def enqueue(self, rollouts: Sequence[Rollout]) -> int:
        """Queue rollouts; existing ones stay unchanged."""
        rollouts = list(rollouts)  # it may be a generator
        check_rollouts(rollouts)
        return self._add(self._kept.rollouts, ((r.rollout_id, replace(r, status="queued")) for r in rollouts))

    def claim(self, worker: str, *, limit: int = 1, lease_s: float = 60.0, within: Ids = None) -> list[AttemptRecord]:
        """Start attempts for up to `limit` rollouts, oldest first."""
        with self._open() as kept:
            self._settle()
            waiting = [
                rollout
                for rollout in kept.rollouts.values()
                if rollout.status == "queued" and (within is None or rollout.rollout_id.startswith(tuple(within)))
            ]
            return [self._begin(rollout, worker, lease_s) for rollout in waiting[: max(0, limit)]]

    def heartbeat(self, leases: Sequence[tuple[str, int]], *, lease_s: float = 60.0) -> list[str]:
        """Renew leases, and return the ids of attempts that have lost theirs."""
        with self._open() as kept:
            lost = []
            for attempt_id, fence in leases:
                attempt = kept.attempts.get(attempt_id)
                if attempt is None or (attempt.status, attempt.fence) != ("running", fence):
                    lost.append(attempt_id)
                else:
                    kept.attempts[attempt_id] = replace(attempt, lease_until_ns=_after_s(lease_s))
            return lost

    def finish(
        self,
        attempt_id: str,
        fence: int,
        *,
        status: AttemptStatus,
        rewards: Sequence[Reward] = (),
        error: str | None = None,
    ) -> RolloutStatus:
        """End an attempt, with its rewards."""
        return self._finish(End(attempt_id, fence, status, rewards, error))

    def _finish(self, end: End) -> RolloutStatus:
        attempt_id, status, rewards = end.attempt_id, end.status, end.rewards
        with self._open() as kept:
            attempt = kept.attempts.get(attempt_id)
            if attempt is None or status not in _ENDS:
                raise RefusedError(f"there is no attempt {attempt_id} that could end as {status!r}")
            ids = (attempt_id, attempt.rollout.rollout_id)
            if any((reward.attempt_id, reward.rollout_id) != ids for reward in rewards):
                raise RefusedError(f"a reward of another attempt can't end attempt {attempt_id}")
            if attempt.fence != end.fence or attempt.status not in ("running", status):
                raise LeaseLostError(f"attempt {attempt_id} is {attempt.status}, its fence is {attempt.fence}")
            if attempt.status == "running":
                self.add_rewards(rewards)
                self._end(attempt, status, end.error, final=end.final)
            return kept.rollouts[ids[1]].status

    def finish_all(self, ends: Sequence[End]) -> list[RolloutStatus | LightningError]:
        """End several attempts."""
        return [self._answer(end) for end in ends]

    def _answer(self, end: End) -> RolloutStatus | LightningError:
        try:
            return self._finish(end)
        except (RefusedError, LeaseLostError, RewardError) as error:
            return error

    def cancel(self, rollout_ids: Sequence[str]) -> int:
        """Cancel rollouts that have not ended."""
        with self._open() as kept:
            named = [kept.rollouts[one] for one in dict.fromkeys(rollout_ids) if one in kept.rollouts]
            ending = {rollout.rollout_id for rollout in named if rollout.status in _OPEN}
            for attempt in list(kept.attempts.values()):
                if attempt.status == "running" and attempt.rollout.rollout_id in ending:
                    self._end(attempt, "cancelled", None)
            for rollout_id in ending:
                self._stand(rollout_id, "cancelled")
            return len(ending)

    def consume_group(self, group_id: str, consumer: str) -> bool:
        """Mark a group as trained on by `consumer`, and return whether no other consumer had it."""
        with self._open() as kept:
            return kept.consumed.setdefault(group_id, consumer) == consumer

    def delete(
        self,
        *,
        rollout_ids: Ids = None,
        trace_ids: Ids = None,
        call_ids: Ids = None,
        origin: str | None = None,
        before_ns: int | None = None,
        compact: bool = False,  # noqa: ARG002 - nothing is left of what is deleted
    ) -> int:
        """Delete ended rollouts with everything that belongs to them, and traces without a rollout."""
        filters = DeleteFilter(rollout_ids, trace_ids, call_ids, origin, before_ns)
        filters.check()
        with self._open() as kept:
            gone = set() if trace_ids is not None or call_ids is not None else self._ended(filters)
            deleted = len(gone)
            calls = {one.call_id for one in kept.calls.values() if one.rollout_id in gone}
            if rollout_ids is None:
                loose = self._loose_filter(filters)
                calls |= {one.call_id for one in kept.calls.values() if loose(one)}
                deleted += _drop(kept.spans, loose)
            calls |= {copy_id(one) for one in calls}
            deleted += _drop(kept.calls, lambda one: one.call_id in calls and one.rollout_id not in gone)
            for records in (kept.spans, kept.calls, kept.rewards, kept.rollouts):
                _drop(records, lambda one: one.rollout_id in gone)
            old = {one.attempt_id for one in kept.attempts.values() if one.rollout.rollout_id in gone}
            _drop(kept.assignments, lambda one: one.attempt_id in old)
            _drop(kept.attempts, lambda one: one.rollout.rollout_id in gone)
            if filters.is_by_age:
                self._drop_conversations(before_ns or 0)
            return deleted

    def _ended(self, filters: DeleteFilter) -> set[str]:
        wanted = _record_filter(Where(rollout_ids=filters.rollout_ids, origin=filters.origin))
        rollouts = self._kept.rollouts.values()
        return {one.rollout_id for one in rollouts if wanted(one) and self._is_over(one, filters.before_ns)}

    def _loose_filter(self, filters: DeleteFilter) -> Callable[[Any], bool]:
        """Return whether a span or call belongs to no rollout and passes the filters."""
        wanted, named = _record_filter(Where(origin=filters.origin)), (filters.trace_ids, filters.call_ids)

        def passes(one: Any) -> bool:
            ids = (one.trace_id, getattr(one, "call_id", None))
            is_named = named == (None, None) or any(
                one_id in (those or ()) for one_id, those in zip(ids, named, strict=True)
            )
            return (
                one.rollout_id not in self._kept.rollouts
                and wanted(one)
                and is_named
                and _before(one, filters.before_ns)
            )

        return passes

    def _drop_conversations(self, before_ns: int) -> None:
        kept = self._kept
        old = {one.attempt_id for one in kept.assignments.values() if one.at_ns < before_ns} - kept.attempts.keys()
        _drop(kept.assignments, lambda one: one.at_ns < before_ns and one.attempt_id in old)
        _drop(
            kept.rewards,
            lambda one: (
                one.rollout_id not in kept.rollouts
                and (one.attempt_id in old or (one.given_ns or before_ns) < before_ns)
            ),
        )

    def _is_over(self, rollout: Rollout, before_ns: int | None) -> bool:
        tries = [one for one in self._kept.attempts.values() if one.rollout.rollout_id == rollout.rollout_id]
        last_ns = max((one.ended_ns or 0 for one in tries), default=0)
        return rollout.status not in _OPEN and (before_ns is None or last_ns < before_ns)

    @contextmanager
    def _open(self) -> Iterator[_StoreContents]:
        if self._closed:
            raise StoreError("the store in memory is closed. Open it again to continue.")
        with self._kept.lock:
            yield self._kept

    def _add(self, table: dict[Any, R], new: Iterable[tuple[Any, R]]) -> int:
        with self._open():
            before = len(table)
            for key, record in new:
                table.setdefault(key, record)
            return len(table) - before

    def _begin(self, rollout: Rollout, worker: str, lease_s: float) -> AttemptRecord:
        kept = self._kept
        earlier = [one for one in kept.attempts.values() if one.rollout.rollout_id == rollout.rollout_id]
        attempt = AttemptRecord(
            attempt_id=f"{rollout.rollout_id}.{len(earlier) + 1}",
            rollout=self._stand(rollout.rollout_id, "running"),
            number=len(earlier) + 1,
            fence=next(kept.fences),
            worker=worker,
            lease_until_ns=_after_s(lease_s),
            started_ns=time.time_ns(),
            disturbed=sum(one.status == "disturbed" for one in earlier),
            failures=sum(one.status in FAILED for one in earlier),
        )
        kept.attempts[attempt.attempt_id] = attempt
        return attempt

    def _settle(self) -> None:
        """Mark attempts with an expired lease as lost."""
        for attempt in list(self._kept.attempts.values()):
            if attempt.status == "running" and attempt.lease_until_ns < _after_s(0):
                self._end(attempt, "lost", "there was no heartbeat before the lease ran out")

    def _end(self, attempt: AttemptRecord, status: AttemptStatus, error: str | None, *, final: bool = False) -> None:
        ended = replace(attempt, status=status, ended_ns=time.time_ns(), error=error)
        self._kept.attempts[attempt.attempt_id] = ended
        if status in ("succeeded", "cancelled"):
            stands: RolloutStatus = "succeeded" if status == "succeeded" else "cancelled"
        else:
            stands = "queued" if self._tries_left(attempt.rollout) and not final else "failed"
        self._stand(attempt.rollout.rollout_id, stands)

    def _tries_left(self, rollout: Rollout) -> bool:
        ends = Counter(a.status for a in self._kept.attempts.values() if a.rollout.rollout_id == rollout.rollout_id)
        uncounted = sum(ends[status] for status in UNCOUNTED)
        return ends.total() - min(uncounted, UNCOUNTED_MOST) < rollout.max_attempts

    def _stand(self, rollout_id: str, status: RolloutStatus) -> Rollout:
        self._kept.rollouts[rollout_id] = replace(self._kept.rollouts[rollout_id], status=status)
        return self._kept.rollouts[rollout_id]


def _after_s(seconds: float) -> int:
    """Return the time in so many seconds on the monotonic clock, shifted to be after every `started_ns`."""
    return _EPOCH_NS + time.monotonic_ns() + int(seconds * 1e9)


_EPOCH_NS: Final = time.time_ns() - time.monotonic_ns()


def _before(record: Any, time_ns: int | None) -> bool:
    return time_ns is None or record.end_ns < time_ns


def _drop(table: dict[Any, Any], doomed: Callable[[Any], bool]) -> int:
    keys = [key for key, record in table.items() if doomed(record)]
    for key in keys:
        del table[key]
    return len(keys)


def _finite(reward: Reward) -> Reward:
    return replace(reward, value=as_reward(reward.value))


def _record_filter(where: Where) -> Callable[[Any], bool]:
    given = [
        (name.removesuffix("s"), set(value)) if name.endswith("_ids") else (name, {value})
        for name, value in where.given().items()
    ]
    return lambda record: all(_field(record, name) in wanted for name, wanted in given)


def _field(record: Any, name: str) -> Any:
    """Return a record's field; for an attempt also its rollout's."""
    return getattr(record, name) if hasattr(record, name) else getattr(record.rollout, name)
