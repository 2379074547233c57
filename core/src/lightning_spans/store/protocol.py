"""The protocol of every store, the filters of its lists, and functions that read whole lists."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, Generic, Protocol, TypeVar, runtime_checkable

from lightning_spans.errors import LightningError, RefusedError
from lightning_spans.schema.attempts import AttemptRecord, AttemptStatus, End, Rollout, RolloutStatus
from lightning_spans.schema.calls import Call
from lightning_spans.schema.rewards import Reward
from lightning_spans.schema.spans import Span
from lightning_spans.store.deployments import Assignment, Deployment
from lightning_spans.store.states import AttemptState, RolloutState

R = TypeVar("R")
Ids = Sequence[str] | None

PAGE: Final = 1000  # records in a page by default
LARGEST_PAGE: Final = (
    10_000  # largest page of a server; a million spans of 1.5 KB are a gigabyte, many times that as objects
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """Which records to read. Filters combine with "and"; None filters nothing, an empty list matches nothing.

    Attributes:
        rollout_ids: of these rollouts.
        attempt_ids: of these attempts.
        trace_ids: of these traces.
        call_ids: these calls.
        group_ids: of these groups.
        status: of rollouts with this status.
        origin: recorded under this label; that of an attempt is its rollout's.
    """

    rollout_ids: Ids = None
    attempt_ids: Ids = None
    trace_ids: Ids = None
    call_ids: Ids = None
    group_ids: Ids = None
    status: RolloutStatus | None = None
    origin: str | None = None

    def given(self) -> dict[str, Any]:
        """Return the filters that are not None, by name."""
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in found.items() if value is not None}


ANY: Final = Where()


@dataclass(frozen=True, slots=True)
class DeleteFilter:
    """What to delete; see `Store.delete`. None filters nothing."""

    rollout_ids: Ids = None
    trace_ids: Ids = None
    call_ids: Ids = None
    origin: str | None = None
    before_ns: int | None = None

    def check(self) -> None:
        """Reject a deletion without a filter, or of rollouts together with traces or calls.

        Raises:
            RefusedError: it is one of these two.
        """
        if self == DeleteFilter():
            raise RefusedError("delete: give rollout_ids, trace_ids, call_ids, an origin or a time")
        if self.rollout_ids is not None and not (self.trace_ids is None and self.call_ids is None):
            raise RefusedError("delete: give rollout_ids, or trace_ids and call_ids, which belong to no rollout")

    @property
    def is_by_age(self) -> bool:
        """Whether the time is the only filter."""
        return self.before_ns is not None and self == DeleteFilter(before_ns=self.before_ns)


@dataclass(frozen=True, slots=True)
class Page(Generic[R]):
    """Some records of a list.

    Attributes:
        records: in the order of arrival.
        next: where to continue, as `after`; None: there are no more.
    """

    records: list[R]
    next: int | None = None


@dataclass(frozen=True, slots=True)
class Listing:
    """A kind of record that a store lists.

    Attributes:
        kind: the record's class.
        filters: fields of `Where` that it can be filtered by.
        started: when a record of it started, by which whole lists are ordered; None: they are in the order of arrival.
    """

    kind: type[Any]
    filters: frozenset[str]
    started: Callable[[Any], int] | None = None


_OF_ATTEMPTS: Final = frozenset({"rollout_ids", "attempt_ids"})
_OF_TRACES: Final = _OF_ATTEMPTS | {"trace_ids", "origin"}
LISTINGS: Final[Mapping[str, Listing]] = {
    "spans": Listing(Span, _OF_TRACES, lambda span: int(span.start_ns)),
    "calls": Listing(Call, _OF_TRACES | {"call_ids"}, lambda call: int(call.start_ns)),
    "rewards": Listing(Reward, _OF_ATTEMPTS),
    "rollouts": Listing(Rollout, frozenset({"rollout_ids", "group_ids", "status", "origin"})),
    "attempts": Listing(AttemptRecord, _OF_ATTEMPTS | {"origin"}),
    "rollout_states": Listing(RolloutState, frozenset({"rollout_ids"})),
    "attempt_states": Listing(AttemptState, _OF_ATTEMPTS),
    "deployments": Listing(Deployment, frozenset()),
    "assignments": Listing(Assignment, frozenset({"attempt_ids"})),
}
"""What can be listed, by its name over HTTP and that of the store's method for the whole list, if there is one."""
_BY_KIND: Final = {listing.kind: (name, listing) for name, listing in LISTINGS.items()}


def check_rollouts(new: Sequence[Rollout]) -> None:
    """Reject rollouts that cannot be queued.

    Raises:
        RefusedError: one has no id, allows no attempt, or no time for one.
    """
    for rollout in new:
        if (problem := rollout.problem()) is not None:
            raise RefusedError(f"rollout {rollout.rollout_id}: {problem}")


def listing_of(kind: type[Any], where: Where) -> tuple[str, Listing]:
    """Return the name and description of the list of these records.

    Raises:
        RefusedError: it cannot be filtered this way.
    """
    name, listing = _BY_KIND[kind]
    if wrong := where.given().keys() - listing.filters:
        raise RefusedError(f"{name} can't be filtered by {', '.join(sorted(wrong))}")
    return name, listing


@runtime_checkable
class Store(Protocol):
    """Traces, calls, rewards and the queue of rollouts. When a method returns, its records are on disk.

    A store subclasses it, and so gets the five whole lists from its `page`.

    Every method may be called from any thread. It raises StoreError if the store is closed or fails, and RefusedError
    if a record or request is invalid, so that a retry would not help. Reads return records in the order of their start
    (rewards: of arrival). Filters combine with "and"; None filters nothing.
    """

    def add_spans(self, spans: Sequence[Span]) -> int:
        """Keep spans. Existing ones, by (attempt_id, trace_id, span_id), are not changed.

        Returns the number of new ones.
        """
        ...

    def add_calls(self, calls: Sequence[Call]) -> int:
        """Keep calls. Existing ones, by call_id, are not changed. Returns the number of new ones."""
        ...

    def add_rewards(self, rewards: Sequence[Reward]) -> int:
        """Keep rewards. Existing ones, by reward_id, are not changed. Returns the number of new ones."""
        ...

    def add_deployments(self, deployments: Sequence[Deployment]) -> int:
        """Keep transitions. Existing ones, by (agent, number), are not changed. Returns the number of new ones."""
        ...

    def add_assignments(self, assignments: Sequence[Assignment]) -> int:
        """Keep assignments. Existing ones, by (agent, attempt_id), are not changed.

        Returns the number of new ones.
        """
        ...

    def page(
        self,
        kind: type[R],
        where: Where = ANY,
        *,
        after: int = 0,
        limit: int | None = PAGE,
        newest_first: bool = False,
    ) -> Page[R]:
        """Read some records: `Span`, `Call`, `Reward`, `Rollout`, `AttemptRecord`, `Deployment` or `Assignment`.

        `RolloutState` and `AttemptState` are rollouts and attempts without tasks, for those who wait for many.
        Pages follow each other in the order of arrival, so that records added later are on a later page and none is
        returned twice.

        Args:
            kind: the class of the records.
            where: which of them.
            after: `Page.next` of the previous page; 0: from the beginning.
            limit: most records; a server returns at most `LARGEST_PAGE`. None: as many as it returns at once.
            newest_first: in the reverse order, which never returns what is added after the first page.

        Raises:
            RefusedError: such records cannot be filtered this way.
        """
        ...

    def spans(
        self, *, rollout_ids: Ids = None, attempt_ids: Ids = None, trace_ids: Ids = None, origin: str | None = None
    ) -> list[Span]:
        """Return spans in the order of their start."""
        where = Where(rollout_ids=rollout_ids, attempt_ids=attempt_ids, trace_ids=trace_ids, origin=origin)
        return whole_list(self, Span, where)

    def calls(
        self, *, rollout_ids: Ids = None, attempt_ids: Ids = None, trace_ids: Ids = None, origin: str | None = None
    ) -> list[Call]:
        """Return calls in the order of their start."""
        where = Where(rollout_ids=rollout_ids, attempt_ids=attempt_ids, trace_ids=trace_ids, origin=origin)
        return whole_list(self, Call, where)

    def rewards(self, *, rollout_ids: Ids = None, attempt_ids: Ids = None) -> list[Reward]:
        """Return rewards in the order of their arrival."""
        return whole_list(self, Reward, Where(rollout_ids=rollout_ids, attempt_ids=attempt_ids))

    def enqueue(self, rollouts: Sequence[Rollout]) -> int:
        """Queue rollouts. Existing ones, by rollout_id, are not changed. Returns the number of new ones."""
        ...

    def claim(self, worker: str, *, limit: int = 1, lease_s: float = 60.0, within: Ids = None) -> list[AttemptRecord]:
        """Start attempts for up to `limit` rollouts that are waiting or whose lease has expired, oldest first.

        An attempt whose lease has expired becomes ``lost``; its rollout is retried while it has attempts left,
        otherwise it fails. With `within`, only rollouts whose id starts with one of these texts are claimed. The others
        in the same store are for other runners.
        """
        ...

    def heartbeat(self, leases: Sequence[tuple[str, int]], *, lease_s: float = 60.0) -> list[str]:
        """Renew leases given as (attempt_id, fence). Returns the attempt ids whose lease is lost."""
        ...

    def finish(
        self,
        attempt_id: str,
        fence: int,
        *,
        status: AttemptStatus,
        rewards: Sequence[Reward] = (),
        error: str | None = None,
    ) -> RolloutStatus:
        """End an attempt, with its rewards, in one transaction. Returns the rollout's status.

        The same end sent twice (same fence, same status) gets the same response and is counted once. An end in
        `UNCOUNTED` is retried without using up one of the rollout's tries, up to `UNCOUNTED_MOST` times.

        Raises:
            LeaseLostError: the fence is old, or the attempt already ended otherwise.
            RefusedError: no such attempt, `status` does not end an attempt, or a reward belongs to another attempt.
            RewardError: a reward is not a finite number.
        """
        ...

    def finish_all(self, ends: Sequence[End]) -> list[RolloutStatus | LightningError]:
        """End several attempts in one transaction: for each, the result of `finish`, or the error that it raises.

        A rollout whose attempt ends with `End.final` is not tried again.
        """
        ...

    def cancel(self, rollout_ids: Sequence[str]) -> int:
        """Cancel rollouts that have not ended; their running attempts lose their leases. Returns their number."""
        ...

    def rollouts(
        self,
        *,
        rollout_ids: Ids = None,
        group_ids: Ids = None,
        status: RolloutStatus | None = None,
        origin: str | None = None,
    ) -> list[Rollout]:
        """Return rollouts in the order they were queued."""
        where = Where(rollout_ids=rollout_ids, group_ids=group_ids, status=status, origin=origin)
        return whole_list(self, Rollout, where)

    def attempts(
        self, *, rollout_ids: Ids = None, attempt_ids: Ids = None, origin: str | None = None
    ) -> list[AttemptRecord]:
        """Return attempts in the order of their start; `origin` is that of their rollout."""
        where = Where(rollout_ids=rollout_ids, attempt_ids=attempt_ids, origin=origin)
        return whole_list(self, AttemptRecord, where)

    def consume_group(self, group_id: str, consumer: str) -> bool:
        """Mark a group as trained on by `consumer` (a run and step). False when another consumer had it."""
        ...

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
        """Delete rollouts that have ended, with their attempts, spans, calls and rewards, and traces without a rollout.

        Given `rollout_ids`, only of these; given `trace_ids` or `call_ids`, only these traces and calls, if they belong
        to no rollout. A candidate's answer to a copy of a call is deleted with the call. `before_ns` keeps what ended
        at or after that Unix time. What waits or runs stays, and so do the marks of groups that were trained on, and
        deployments. Assignments of a deleted attempt are deleted with it. Assignments and rewards of conversations
        outside of attempts are deleted if `before_ns` is the only filter. With `compact` the tables are rewritten
        afterwards, so that their files contain nothing deleted; this takes as long as copying them, and other writers
        wait. Returns the number of deleted rollouts, and of deleted spans and calls without one.

        Raises:
            RefusedError: there is no filter, so nobody deletes everything by mistake; or rollouts are named together
                with traces or calls.
        """
        ...

    def close(self) -> None:
        """Write what is pending and close the files."""
        ...


def whole_list(store: Store, kind: type[R], where: Where = ANY) -> list[R]:
    """Read a list to its end, in the order of its records' start (rewards, rollouts and attempts: of arrival)."""
    page = store.page(kind, where, limit=None)
    records = page.records
    while page.next is not None:
        page = store.page(kind, where, after=page.next, limit=None)
        records += page.records
    _, listing = listing_of(kind, where)
    return records if listing.started is None else sorted(records, key=listing.started)


def each(
    store: Store, kind: type[R], where: Where = ANY, *, limit: int = PAGE, newest_first: bool = False
) -> Iterator[R]:
    """Read a list page by page, in the order of its pages; one page at a time is in memory."""
    after: int | None = 0
    while after is not None:
        page = store.page(kind, where, after=after, limit=limit, newest_first=newest_first)
        yield from page.records
        after = page.next
