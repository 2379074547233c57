"""A store that keeps nothing: for `lightning-rl serve`, whose calls are not used for training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from lightning_spans.errors import LightningError, StoreError
from lightning_spans.schema.attempts import AttemptRecord, AttemptStatus, End, Rollout, RolloutStatus
from lightning_spans.schema.calls import Call
from lightning_spans.schema.rewards import Reward
from lightning_spans.schema.spans import Span
from lightning_spans.store.deployments import Assignment, Deployment
from lightning_spans.store.protocol import ANY, PAGE, Ids, Page, Store, Where

R = TypeVar("R")


class NullStore(Store):
    """Accepts spans, calls and rewards, and drops them. It has no queue."""

    def add_spans(self, spans: Sequence[Span]) -> int:
        """Drop spans."""
        return len(spans)

    def add_calls(self, calls: Sequence[Call]) -> int:
        """Drop calls."""
        return len(calls)

    def add_rewards(self, rewards: Sequence[Reward]) -> int:
        """Drop rewards."""
        return len(rewards)

    def add_deployments(self, deployments: Sequence[Deployment]) -> int:
        """Reject transitions: they could not be found again."""
        raise StoreError(f"this server has no store, so it can't deploy ({len(deployments)} transitions were sent)")

    def add_assignments(self, assignments: Sequence[Assignment]) -> int:
        """Drop assignments."""
        return len(assignments)

    def page(
        self,
        kind: type[R],
        where: Where = ANY,
        *,
        after: int = 0,
        limit: int | None = PAGE,
        newest_first: bool = False,
    ) -> Page[R]:
        """Return nothing."""
        return Page([])

    def enqueue(self, rollouts: Sequence[Rollout]) -> int:
        """Reject rollouts: nothing would run them."""
        raise StoreError(f"this server serves a model and runs no rollouts ({len(rollouts)} were sent)")

    def claim(self, worker: str, *, limit: int = 1, lease_s: float = 60.0, within: Ids = None) -> list[AttemptRecord]:
        """Return nothing to do."""
        return []

    def heartbeat(self, leases: Sequence[tuple[str, int]], *, lease_s: float = 60.0) -> list[str]:
        """Report every lease as lost."""
        return [attempt_id for attempt_id, _ in leases]

    def finish(
        self,
        attempt_id: str,
        fence: int,
        *,
        status: AttemptStatus,
        rewards: Sequence[Reward] = (),
        error: str | None = None,
    ) -> RolloutStatus:
        """Raise: there are no attempts."""
        raise self._no_attempt(attempt_id)

    def finish_all(self, ends: Sequence[End]) -> list[RolloutStatus | LightningError]:
        """Return errors: there are no attempts."""
        return [self._no_attempt(end.attempt_id) for end in ends]

    def _no_attempt(self, attempt_id: str) -> StoreError:
        return StoreError(f"there is no attempt {attempt_id}: this server runs no rollouts")

    def cancel(self, rollout_ids: Sequence[str]) -> int:
        """Find nothing to cancel."""
        return 0

    def consume_group(self, group_id: str, consumer: str) -> bool:
        """Know of no group."""
        return False

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
        """Find nothing to delete."""
        return 0

    def close(self) -> None:
        """There is nothing to close."""
