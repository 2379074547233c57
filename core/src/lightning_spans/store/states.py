"""The states of rollouts and attempts without their tasks, which may be large: for those who wait for many."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_spans.schema.attempts import AttemptStatus, RolloutStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutState:
    """The state of a rollout without its task.

    Attributes:
        rollout_id: its id.
        group_id: its group.
        status: its current status.
    """

    rollout_id: str
    group_id: str
    status: RolloutStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptState:
    """The state of an attempt without its rollout.

    Attributes:
        attempt_id: its id.
        rollout_id: the rollout that it tries.
        worker: the worker that claimed it.
        status: its current status.
        started_ns: Unix time in nanoseconds.
        error: why it failed; None otherwise.
    """

    attempt_id: str
    rollout_id: str
    worker: str
    status: AttemptStatus
    started_ns: int
    error: str | None = None
