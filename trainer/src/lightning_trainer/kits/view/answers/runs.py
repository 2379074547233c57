"""The list of runs, and a run with its steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
    """A run in the list of runs. Rewards are means over rollouts; None where there is none."""

    name: str
    model: str | None
    agents: list[str] | None
    steps: int
    started_s: float | None
    updated_s: float | None
    reward_first: float | None
    reward_last: float | None
    val_first: float | None
    val_last: float | None
    alarms: int
    curve: list[float]
    options: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """The rollouts of a step, or of the validation before it, as the store has them.

    Attributes:
        mode: ``train``, ``val``, or ``other`` for rollouts that no run of ours named.
        step: steps taken before; of ``other`` 0.
        groups: how many.
        rollouts: how many.
        status: number of rollouts that stand so, by status.
        reward: mean over tasks, as the run logged it. While the step runs, and without a log: over the groups, of the
            rollouts that have succeeded so far; None without one.
        reward_low, reward_high: its 95 % interval.
        low: the lowest.
        high: the highest.
        flat: groups in which all rewards are equal.
    """

    mode: str
    step: int
    groups: int
    rollouts: int
    status: dict[str, int]
    reward: float | None
    reward_low: float | None
    reward_high: float | None
    low: float | None
    high: float | None
    flat: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPage:
    """A run: its options, the numbers of its steps, its alarms, and what its store holds.

    `result` says in a sentence what came of the held-out reward; None before there are two validations. `most_frequent`
    has, by agent, the most frequent short answer of the newest step or validation, and its share.
    """

    name: str
    options: dict[str, Any]
    train: list[dict[str, Any]]
    val: list[dict[str, Any]]
    alarms: list[dict[str, Any]]
    steps: list[StepRow]
    loose: bool
    result: str | None
    most_frequent: dict[str, tuple[str, float]]
