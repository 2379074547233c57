"""A queue of one process in a store that others may share: each process runs only the rollouts that it queued.

It also decides what is retried: a failure that counts is the result of its rollout, so a retry would be useless. A
result without an answer that the engine failed to give is retried.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol, cast

from lightning_spans.errors import LightningError
from lightning_spans.schema.attempts import AttemptRecord, AttemptStatus, End, Rollout, RolloutStatus
from lightning_spans.schema.calls import Call
from lightning_spans.schema.rewards import Reward
from lightning_spans.store import Store
from lightning_trainer.reasons.call_errors import ENGINE_ENDED, ENGINE_WAIT

_FAULTS: Final = (ENGINE_ENDED, ENGINE_WAIT)


class SettleEnd(Protocol):
    """Returns the end of an attempt as it counts."""

    def __call__(self, store: Store, end: End, *, lost_answers: bool) -> End:
        """Return the end, unchanged or not."""
        ...


class _OwnQueue:
    """Proxy of a store, except for claims: those get only what was queued through this proxy."""

    def __init__(self, store: Store, settle: SettleEnd) -> None:
        self._store = store
        self._settle = settle
        self._began: dict[str, None] = {}  # prefixes of the ids of queued rollouts
        # Attempts that lost an answer, perhaps because of their engine. An end may be reported twice, so they are kept.
        self._doubted: set[str] = set()

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
        (told,) = self.finish_all([End(attempt_id, fence, status, tuple(rewards), error)])
        if isinstance(told, LightningError):
            raise told
        return told

    def finish_all(self, ends: Sequence[End]) -> list[RolloutStatus | LightningError]:
        """End attempts, like `finish`."""
        settled = [self._settle(self._store, end, lost_answers=end.attempt_id in self._doubted) for end in ends]
        return self._store.finish_all(settled)

    def add_calls(self, calls: Sequence[Call]) -> int:
        """Keep calls; those that their engine may have failed put the result of their attempt in doubt."""
        failed = (call for call in calls if call.error is not None and call.attempt_id is not None)
        self._doubted.update(str(call.attempt_id) for call in failed if not call.sampling.keys().isdisjoint(_FAULTS))
        return self._store.add_calls(calls)


def own_queue(store: Store, settle: SettleEnd) -> Store:
    """Return the store with a separate queue for this process: rollouts of others, left behind or waiting, are not run.

    Args:
        store: the store that contains the queue.
        settle: returns the end of an attempt as it counts: see `rl.rollouts.settle_end`.
    """
    return cast(Store, _OwnQueue(store, settle))


def _beginning(rollout_id: str) -> str:
    """Return the prefix of an id up to the colon, which a batch shares (see `rl.rollouts.plan`).

    Otherwise the whole id.
    """
    name, colon, _ = rollout_id.rpartition(":")
    return f"{name}{colon}" or rollout_id


def _meet(one: str, other: str) -> bool:
    return one.startswith(other) or other.startswith(one)
