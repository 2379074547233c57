"""Options of how rollouts are run: how many at once, how long, how often, and how failures count."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from lightning_trainer.choices import Timeouts
from lightning_trainer.options.record import OptionRecord


class FailureOptions(OptionRecord):
    """How failed rollouts count."""

    failed: Literal["exclude", "lowest"] | float = "lowest"
    """Reward of a rollout whose program failed after a model had answered: 0 or the lowest reward of the batch,
    whichever is less (lowest); this number; or no reward (exclude), which teaches policies to crash. Rollouts lost to
    dead workers or unreachable servers are left out and retried."""
    timeouts: Timeouts = "count"
    """How to count rollouts that exceed `timeout_s`, or whose program gives up on a model call, after a model has
    answered: as failures (count), or not at all (exclude). Exclude them only if slow infrastructure is to blame,
    because it teaches policies to hang and to write answers that take too long."""


class LimitOptions(OptionRecord):
    """How many rollouts run at once, how long and how often."""

    workers: int | None = Field(default=None, ge=0)
    """Worker processes. Default: one per core, but no more than a batch can use. With backend = "verl", 0 leaves the
    rollouts to runners on other machines."""
    concurrency: int = Field(default=16, ge=1)
    """Concurrent rollouts per worker."""
    isolate: bool = False
    """Run each attempt in its own process, which is ended together with every process that it started. Its run and
    score functions get the main thread, which signals need. One attempt at once per worker."""
    timeout_s: float = Field(default=300.0, gt=0)
    """Time limit of an attempt, in seconds."""
    max_attempts: int = Field(default=2, ge=1)
    """Attempts before a rollout counts as failed."""
