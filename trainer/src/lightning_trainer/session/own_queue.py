"""A queue of one process in a store that others may share: each process runs only the rollouts that it queued.

It also decides what is retried: a failure that counts is the result of its rollout, so a retry would be useless.
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
    """Proxy of a store, except for claims: those get only what was queued through this proxy."""

    def __init__(self, store: Store, is_result: Callable[[Store, End], bool]) -> None:
        self._store = store
        self._is_result = is_result
        self._began: dict[str, None] = {}  # prefixes of the ids of queued rollouts

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
        """Start attempts for rollouts that were queued here.

        With `within`, only those with one of these id prefixes.
        """
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
        """End an attempt; one with a failure that counts is not retried."""
        if not self._is_result(self._store, end := End(attempt_id, fence, status, tuple(rewards), error)):
            return self._store.finish(attempt_id, fence, status=status, rewards=rewards, error=error)
        (told,) = self._store.finish_all([replace(end, final=True)])
        if isinstance(told, LightningError):
            raise told
        return told

    def finish_all(self, ends: Sequence[End]) -> list[RolloutStatus | LightningError]:
        """End attempts, like `finish`."""
        return self._store.finish_all([replace(end, final=self._is_result(self._store, end)) for end in ends])


def own_queue(store: Store, is_result: Callable[[Store, End], bool] = lambda _, __: False) -> Store:
    """Return the store with a separate queue for this process: rollouts of others, left behind or waiting, are not run.

    Args:
        store: the store that contains the queue.
        is_result: whether an end of an attempt is the result of its rollout, so that no retry would count.
    """
    return cast(Store, _OwnQueue(store, is_result))


def _beginning(rollout_id: str) -> str:
    """Return the prefix of an id up to the colon, which a batch shares (see `rl.rollouts.plan`).

    Otherwise the whole id.
    """
    name, colon, _ = rollout_id.rpartition(":")
    return f"{name}{colon}" or rollout_id


def _meet(one: str, other: str) -> bool:
    return one.startswith(other) or other.startswith(one)
