"""The queue of one process in a store that others may share: what another queued is run by that one's program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from lightning_spans.schema.attempts import AttemptRecord, Rollout
from lightning_spans.store import Store


class _OwnQueue:
    """Hands everything on to a store, but for claims: those get what was queued through this one."""

    def __init__(self, store: Store) -> None:
        self._store = store
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


def own_queue(store: Store) -> Store:
    """Return the store with a queue of this process's own: nobody else's rollouts, left behind or waiting, are run."""
    return cast(Store, _OwnQueue(store))


def _beginning(rollout_id: str) -> str:
    """Return the name before the colon, which the ids of a batch share, see `rl.rollouts.plan`; else all of it."""
    name, colon, _ = rollout_id.rpartition(":")
    return f"{name}{colon}" or rollout_id


def _meet(one: str, other: str) -> bool:
    return one.startswith(other) or other.startswith(one)
