"""How many worker processes run rollouts by default."""

from __future__ import annotations

import os


def cores() -> int:
    """Return the number of processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def worker_count(asked: int | None, rollouts: int, concurrency: int) -> int:
    """Return the number of worker processes: as requested, otherwise one per core but no more than the work can use.

    Args:
        asked: the user's choice; None: none.
        rollouts: how many there are in total.
        concurrency: concurrent rollouts in each worker.
    """
    return max(1, min(cores(), -(-rollouts // concurrency))) if asked is None else asked
