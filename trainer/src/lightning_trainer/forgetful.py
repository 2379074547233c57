# ruff: noqa: ARG002 - arguments are part of the protocol
"""A store that keeps nothing: for `lightning-rl serve`, whose calls nobody will train on."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_spans.errors import LightningError, StoreError
from lightning_spans.rewards import Reward
from lightning_spans.spans import Span
from lightning_spans.store import AttemptRecord, AttemptStatus, Call, End, Rollout, RolloutStatus

Ids = Sequence[str] | None


class ForgetfulStore:
    """Takes spans, calls and rewards, and lets go of them. It has no queue."""

    def add_spans(self, spans: Sequence[Span]) -> int:
        """Let go of spans."""
        return len(spans)

    def add_calls(self, calls: Sequence[Call]) -> int:
        """Let go of calls."""
        return len(calls)

    def add_rewards(self, rewards: Sequence[Reward]) -> int:
        """Let go of rewards."""
        return len(rewards)

    def spans(
        self, *, rollout_ids: Ids = None, attempt_ids: Ids = None, trace_ids: Ids = None, origin: str | None = None
    ) -> list[Span]:
        """Give nothing."""
        return []

    def calls(
        self, *, rollout_ids: Ids = None, attempt_ids: Ids = None, trace_ids: Ids = None, origin: str | None = None
    ) -> list[Call]:
        """Give nothing."""
        return []

    def rewards(self, *, rollout_ids: Ids = None, attempt_ids: Ids = None) -> list[Reward]:
        """Give nothing."""
        return []

    def enqueue(self, rollouts: Sequence[Rollout]) -> int:
        """Refuse rollouts: nobody would run them."""
        raise StoreError(f"this server serves a model and runs no rollouts ({len(rollouts)} were sent)")

    def claim(self, worker: str, *, limit: int = 1, lease_s: float = 60.0) -> list[AttemptRecord]:
        """Give nothing to do."""
        return []

    def heartbeat(self, leases: Sequence[tuple[str, int]], *, lease_s: float = 60.0) -> list[str]:
        """Call every lease lost."""
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
        """Know of no attempt."""
        raise StoreError(f"there is no attempt {attempt_id}: this server runs no rollouts")

    def finish_all(self, ends: Sequence[End]) -> list[RolloutStatus | LightningError]:
        """Know of no attempt."""
        return [StoreError(f"there is no attempt {end.attempt_id}: this server runs no rollouts") for end in ends]

    def cancel(self, rollout_ids: Sequence[str]) -> int:
        """Find nothing to cancel."""
        return 0

    def rollouts(
        self,
        *,
        rollout_ids: Ids = None,
        group_ids: Ids = None,
        status: RolloutStatus | None = None,
        origin: str | None = None,
    ) -> list[Rollout]:
        """Give nothing."""
        return []

    def attempts(
        self, *, rollout_ids: Ids = None, attempt_ids: Ids = None, origin: str | None = None
    ) -> list[AttemptRecord]:
        """Give nothing."""
        return []

    def consume_group(self, group_id: str, consumer: str) -> bool:
        """Know of no group."""
        return False

    def delete(
        self,
        *,
        rollout_ids: Ids = None,
        trace_ids: Ids = None,
        origin: str | None = None,
        before_ns: int | None = None,
    ) -> int:
        """Find nothing to delete."""
        return 0

    def close(self) -> None:
        """There is nothing to close."""
