"""How many worker processes run rollouts, where nobody says."""

from __future__ import annotations

import os


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def worker_count(asked: int | None, rollouts: int, concurrency: int) -> int:
    """Return the worker processes to start: as asked, else one a core, and no more than the work fills.

    Args:
        asked: by the user; None: nothing.
        rollouts: there are together.
        concurrency: rollouts at once in each worker.
    """
    return max(1, min(cores(), -(-rollouts // concurrency))) if asked is None else asked
