"""verl's replay buffers, which poll more often and do not wait for groups that will never arrive.

Our trainers set `check`, which raises when rollouts are no longer collected.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

POLL_S: Final = 0.1  # verl's own 2 s are most of a small step


def _check_nothing() -> None:
    """Do nothing; a placeholder until a trainer sets the real check."""


class SyncReplay(ReplayBuffer):  # type: ignore[misc]  # verl has no types
    """Return a batch once all its groups have ended."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, poll_interval=POLL_S)
        self.check: Callable[[], None] = _check_nothing

    def _wait_for_next_poll(self, partition_id: str, last_debug_time: float) -> float:
        self.check()
        return float(super()._wait_for_next_poll(partition_id, last_debug_time))


class AsyncReplay(ReplayBufferAsync):  # type: ignore[misc]  # verl has no types
    """Return a batch once enough groups have ended, oldest first.

    Groups are admitted at a pace: one batch per step, and as many ahead as `staleness` says. A step waits for groups
    that would otherwise become older than that, so that none is thrown away, however slow its task is.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, poll_interval=POLL_S)
        self.check: Callable[[], None] = _check_nothing

    def _wait_for_next_poll(self, partition_id: str, last_debug_time: float) -> float:
        self.check()
        return float(super()._wait_for_next_poll(partition_id, last_debug_time))
