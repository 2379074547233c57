"""How well rollouts did, as people want to know it: the mean reward, and the mean of each agent's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from lightning_spans.rewards import Reward
from lightning_trainer.rollouts import Outcome

_AGENT: Final = "reward/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """How well some rollouts did.

    Attributes:
        reward: mean over rollouts; None when none of them counts.
        by_agent: mean over rollouts of the rewards of each agent, where rewards were given by agent.
        rollouts: how many there were.
        failed: how many of them never succeeded.
    """

    reward: float | None
    by_agent: Mapping[str, float] = field(default_factory=dict)
    rollouts: int = 0
    failed: int = 0

    @classmethod
    def from_metrics(cls, metrics: Mapping[str, float]) -> Score:
        """Read what `metrics` gave; other numbers are left alone."""
        agents = {n.removeprefix(_AGENT): value for n, value in metrics.items() if n.startswith(_AGENT)}
        rollouts, failed = int(metrics["rollouts"]), int(metrics["failed"])
        return cls(reward=metrics.get("reward"), by_agent=agents, rollouts=rollouts, failed=failed)

    def metrics(self) -> dict[str, float]:
        """Give the same as numbers by name, for logs."""
        known = {} if self.reward is None else {"reward": self.reward}
        agents = {f"{_AGENT}{name}": value for name, value in self.by_agent.items()}
        return {**known, **agents, "rollouts": float(self.rollouts), "failed": float(self.failed)}


def score(outcomes: Sequence[Outcome], failed: Literal["exclude"] | float) -> Score:
    """Average over rollouts.

    Args:
        outcomes: of the rollouts.
        failed: the reward of one that never succeeded; ``exclude`` leaves it out.
    """
    values: list[float] = []
    by_agent: dict[str, list[float]] = defaultdict(list)
    for outcome in outcomes:
        if outcome.attempt is None:
            values += [] if failed == "exclude" else [failed]
            continue
        values.append(total(outcome.rewards))
        for name, value in agents_totals(outcome.rewards).items():
            by_agent[name].append(value)
    return Score(
        reward=sum(values) / len(values) if values else None,
        by_agent={name: sum(each) / len(each) for name, each in sorted(by_agent.items())},
        rollouts=len(outcomes),
        failed=sum(outcome.attempt is None for outcome in outcomes),
    )


def total(rewards: Sequence[Reward]) -> float:
    """Give one number for an attempt: the rewards of the whole attempt, and the mean over agents of their own."""
    agents = agents_totals(rewards)
    shared = sum(reward.value for reward in rewards if reward.agent is None)
    return shared + (sum(agents.values()) / len(agents) if agents else 0.0)


def by_source(rewards: Sequence[Reward], attempts: int) -> dict[str, float]:
    """Give the mean over attempts of what each source gave, for logs: `reward_source/NAME`."""
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
