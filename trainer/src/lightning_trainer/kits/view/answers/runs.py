"""The list of runs, and a run with its steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
    """A run in the list of runs. Rewards are means over rollouts; None if there is none."""

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
    """The rollouts of a step, or of the validation before it, as stored.

    Attributes:
        mode: ``train``, ``val``, or ``other`` for rollouts that no run of ours named.
        step: steps taken before; 0 for ``other``.
        groups: number of groups.
        rollouts: number of rollouts.
        status: number of rollouts by status.
        reward: mean over tasks, as the run logged it. While the step runs, and without a log: over the groups, of the
            rollouts that have succeeded so far; None without one.
        reward_low, reward_high: its 95 % interval.
        low: the lowest reward.
        high: the highest reward.
        flat: number of groups without signal, as the run logged it. While the step runs, and without a log: those in
            which all rewards so far are equal and no rollout failed.
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
class HeldOutPoint:
    """A mean held-out reward with its 95 % interval, after this number of steps."""

    step: int
    mean: float
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """Held-out rewards of an agent, or of all trained agents together.

    Attributes:
        agent: agent with these rewards; "" stands for the reward of the trained agents.
        trained: whether the run trains it.
        points: one per validation.
        difference: from the first validation to the last, paired by task; None if they cannot be compared.
        low, high: its 95 % interval.
        tasks: number of paired tasks.
    """

    agent: str
    trained: bool
    points: list[HeldOutPoint]
    difference: float | None
    low: float | None
    high: float | None
    tasks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCost:
    """Cost of a run, validations included: seconds, rollouts, and tokens of the training rollouts."""

    seconds: float
    rollouts: int
    tokens_prompt: int
    tokens_generated: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """The result of a run at a glance.

    Attributes:
        sentence: the result in words.
        held_out: of the trained agents, then of each agent with its own rewards; [] without held-out tasks.
        best: the validation with the highest reward; None without held-out tasks, and with a judge.
        best_folder: its checkpoint, within the run's folder; None if it was not saved.
        cost: of the run.
    """

    sentence: str
    held_out: list[HeldOut]
    best: HeldOutPoint | None
    best_folder: str | None
    cost: RunCost


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollback:
    """A return of a policy to its best weights: `--rollback-on-cliff`.

    Attributes:
        after: steps taken when it fell.
        to_step: steps taken when the weights were saved.
    """

    after: int
    to_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRow:
    """Held-out rewards of a policy with its own weights, or of one that was returned to its best.

    Attributes:
        policy: its name.
        agents: agents that it answers, if they have their own rewards.
        points: steps taken and mean reward, one pair per validation.
        best_step: steps taken when the reward was highest.
        best: that reward.
        last: the newest reward.
        folder: folder of its best weights, within the run's folder; None if they were not saved.
        rollbacks: every return to them.
    """

    policy: str
    agents: list[str]
    points: list[tuple[int, float]]
    best_step: int | None
    best: float | None
    last: float | None
    folder: str | None
    rollbacks: list[Rollback]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalePage:
    """What all pages of a run share.

    Attributes:
        low: the reward at the lower end of the scale of colours.
        high: the one at its upper end.
        agents: in the order of their colours.
        deployed: whether there is a page of deployments: of a store that has some, or that no run's folder names.
    """

    low: float
    high: float
    agents: list[str]
    deployed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPage:
    """A run: its result, options, metrics per step, alarms, and the contents of its store.

    `most_frequent` is, by agent, the most frequent short answer of the newest step or validation, and its share.
    """

    name: str
    options: dict[str, Any]
    train: list[dict[str, Any]]
    val: list[dict[str, Any]]
    alarms: list[dict[str, Any]]
    steps: list[StepRow]
    loose: bool
    headline: Headline
    policies: list[PolicyRow]
    most_frequent: dict[str, tuple[str, float]]
