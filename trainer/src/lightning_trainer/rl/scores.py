"""How well rollouts did, as people want to know it: the mean reward, and the mean of each agent's."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Final

from lightning_spans.schema.rewards import Reward
from lightning_trainer.intervals import estimate_mean, reward_bounds
from lightning_trainer.rl.rollouts import Failed, Outcome

_AGENT: Final = "reward/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """How well some rollouts did.

    Attributes:
        reward: mean over tasks of the mean of each task's rollouts; None when none of them counts.
        by_agent: mean over rollouts of the rewards of each agent, where rewards were given by agent.
        rollouts: how many there were.
        failed: how many of them never succeeded, failed by the policy's doing before they did, or got no verdict.
        tasks: how many tasks those that count are of; rollouts of one task are no independent draws.
        low, high: 95 % interval of `reward`, see `intervals`; None when nothing counts.
    """

    reward: float | None
    by_agent: Mapping[str, float] = field(default_factory=dict)
    rollouts: int = 0
    failed: int = 0
    tasks: int = 0
    low: float | None = None
    high: float | None = None

    @classmethod
    def from_metrics(cls, metrics: Mapping[str, float]) -> Score:
        """Read what `metrics` gave; other numbers are left alone."""
        agents = {n.removeprefix(_AGENT): value for n, value in metrics.items() if n.startswith(_AGENT)}
        rollouts, failed = int(metrics["rollouts"]), int(metrics["failed"])
        return cls(
            reward=metrics.get("reward"),
            by_agent=agents,
            rollouts=rollouts,
            failed=failed,
            tasks=int(metrics.get("tasks", 0)),
            low=metrics.get("reward_low"),
            high=metrics.get("reward_high"),
        )

    def metrics(self) -> dict[str, float]:
        """Return the same as numbers by name, for logs."""
        found = {"reward": self.reward, "reward_low": self.low, "reward_high": self.high}
        known = {name: value for name, value in found.items() if value is not None}
        agents = {f"{_AGENT}{name}": value for name, value in self.by_agent.items()}
        counts = {"rollouts": self.rollouts, "failed": self.failed, "tasks": self.tasks}
        return {**known, **agents, **{name: float(count) for name, count in counts.items()}}


def score(outcomes: Sequence[Outcome], failed: Failed) -> Score:
    """Average over tasks.

    Args:
        outcomes: of the rollouts.
        failed: the reward of one that failed by the policy's doing. Others that never succeeded are left out.
    """
    tasks: dict[str, list[float]] = defaultdict(list)
    by_agent: dict[str, list[float]] = defaultdict(list)
    crashed = reward_of_failures(outcomes, failed)
    for outcome in outcomes:
        counted = outcome.counts(failed)
        if counted is None:
            continue
        task = json.dumps(outcome.rollout.task, sort_keys=True, default=str)  # a step may take one several times
        if counted is outcome.crash:
            tasks[task].append(crashed)
            continue
        tasks[task].append(total(outcome.rewards))
        for name, value in agents_totals(outcome.rewards).items():
            by_agent[name].append(value)
    values = [value for rewards in tasks.values() for value in rewards]
    found = estimate_mean([sum(rewards) / len(rewards) for rewards in tasks.values()], reward_bounds(values))
    return Score(
        reward=found.mean,
        tasks=len(tasks),
        low=found.low,
        high=found.high,
        by_agent={name: sum(each) / len(each) for name, each in sorted(by_agent.items())},
        rollouts=len(outcomes),
        failed=sum(o.attempt is None or o.crash is not None or o.unjudged is not None for o in outcomes),
    )


def reward_of_failures(outcomes: Sequence[Outcome], failed: Failed) -> float:
    """Return the reward of rollouts that failed by the policy's doing, where they are not left out."""
    if isinstance(failed, str):
        return min([0.0, *(_least(o.rewards) for o in outcomes if o.attempt is not None and o.crash is None)])
    return failed


def _least(rewards: Sequence[Reward]) -> float:
    """Return the least that any agent of an attempt was given, as credit gives it, or the attempt's total."""
    shared = sum(reward.value for reward in rewards if reward.agent is None)
    return min([total(rewards), *(shared + own for own in agents_totals(rewards).values())])


def total(rewards: Sequence[Reward]) -> float:
    """Return one number for an attempt: the rewards of the whole attempt, and the mean over agents of their own."""
    agents = agents_totals(rewards)
    shared = sum(reward.value for reward in rewards if reward.agent is None)
    return shared + (sum(agents.values()) / len(agents) if agents else 0.0)


def given_to(outcomes: Sequence[Outcome], automatic: Sequence[Reward], failed: Failed) -> list[Reward]:
    """Return what successes that count were given.

    Args:
        outcomes: of the rollouts.
        automatic: what automatic rules gave, to other attempts such as forks, too.
        failed: the reward of a rollout that failed by the policy's doing; ``exclude`` leaves it out.
    """
    own = {o.attempt.attempt_id: o.rewards for o in outcomes if o.attempt is not None and o.counts(failed) is o.attempt}
    return [*chain.from_iterable(own.values()), *(reward for reward in automatic if reward.attempt_id in own)]


def by_source(rewards: Sequence[Reward], attempts: int) -> dict[str, float]:
    """Return the mean over attempts of what each source gave, for logs: `reward_source/NAME`."""
    totals: dict[str, float] = defaultdict(float)
    for reward in rewards:
        totals[f"reward_source/{reward.source}"] += reward.value / max(attempts, 1)
    return dict(totals)


def agents_totals(rewards: Sequence[Reward]) -> dict[str, float]:
    """Add up the rewards of each agent."""
    totals: dict[str, float] = defaultdict(float)
    for reward in rewards:
        if reward.agent is not None:
            totals[reward.agent] += reward.value
    return dict(totals)
