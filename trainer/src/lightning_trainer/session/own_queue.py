"""The queue of one process in a store that others may share: what another queued is run by that one's program.

It also decides what is tried again: a failure that counts is the result of its rollout, so that a retry would be for
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

from lightning_spans.errors import LightningError
from lightning_spans.schema.attempts import AttemptRecord, AttemptStatus, End, Rollout, RolloutStatus
from lightning_spans.schema.rewards import Reward
from lightning_spans.store import Store


class _OwnQueue:
    """Hands everything on to a store, but for claims: those get what was queued through this one."""

    def __init__(self, store: Store, is_result: Callable[[Store, End], bool]) -> None:
        self._store = store
        self._is_result = is_result
        self._began: dict[str, None] = {}  # how the ids of what was queued begin

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def enqueue(self, rollouts: Sequence[Rollout]) -> int:
        """Queue rollouts, to be claimed here."""
        asked = list(rollouts)  # it may be a generator
        self._began |= dict.fromkeys(_beginning(rollout.rollout_id) for rollout in asked)
        return self._store.enqueue(asked)

    def claim(
        self, worker: str, *, limit: int = 1, lease_s: float = 60.0, within: Sequence[str] | None = None
    ) -> list[AttemptRecord]:
        """Start attempts for rollouts that were queued here; given `within`, for those of them that begin so."""
        asked = list(self._began)
        if within is not None:
            asked = [max(one, each, key=len) for one in asked for each in within if _meet(one, each)]
        return self._store.claim(worker, limit=limit, lease_s=lease_s, within=asked)

    def finish(
        self,
        attempt_id: str,
        fence: int,
        *,
        status: AttemptStatus,
        rewards: Sequence[Reward] = (),
        error: str | None = None,
    ) -> RolloutStatus:
        """End an attempt; one that failed in a way that counts is not tried again."""
        if not self._is_result(self._store, end := End(attempt_id, fence, status, tuple(rewards), error)):
            return self._store.finish(attempt_id, fence, status=status, rewards=rewards, error=error)
        (told,) = self._store.finish_all([replace(end, final=True)])
        if isinstance(told, LightningError):
            raise told
        return told

    def finish_all(self, ends: Sequence[End]) -> list[RolloutStatus | LightningError]:
        """End attempts, as `finish` does."""
        return self._store.finish_all([replace(end, final=self._is_result(self._store, end)) for end in ends])


def own_queue(store: Store, is_result: Callable[[Store, End], bool] = lambda _, __: False) -> Store:
    """Return the store with a queue of this process's own: nobody else's rollouts, left behind or waiting, are run.

    Args:
        store: it is in.
        is_result: whether an end of an attempt is the result of its rollout, so that no other try would count.
    """
    return cast(Store, _OwnQueue(store, is_result))


def _beginning(rollout_id: str) -> str:
    """Return the name before the colon, which the ids of a batch share, see `rl.rollouts.plan`; else all of it."""
    name, colon, _ = rollout_id.rpartition(":")
    return f"{name}{colon}" or rollout_id


def _meet(one: str, other: str) -> bool:
    return one.startswith(other) or other.startswith(one)
