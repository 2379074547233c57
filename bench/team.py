"""A simulated team whose members' contributions are known, to see what each credit assigner makes of its rewards.

Agents take turns in any order, some attempts longer than others. Each call meets a state and takes one of two actions,
one of them good there; a good action of an agent adds the agent's share to the reward. So what a call contributed is
known: its share, where the action was good, less what was to be expected. The policy is a table, so learning takes no
time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from lightning_spans.schema.rewards import Reward
from lightning_spans.schema.transitions import Transition
from lightning_trainer.rl.advantages import transition_advantages
from lightning_trainer.rl.credit.assigners import credit_by_name
from lightning_trainer.rl.credit.values import levels_of

# One reward for all, one for each agent, both of these, or one for each call.
Told = Literal["team", "agents", "both", "steps"]
SHARES = {"planner": 3.0, "writer": 2.0, "checker": 1.0, "rider": 0.0}
GOAL, GROUP, GROUPS, LONGEST = 0.8, 8, 4, 50  # a step is 32 rollouts


@dataclass(frozen=True)
class Team:
    """Who is in it, what each contributes, and what it meets.

    Attributes:
        shares: by agent; one with 0 is a free rider.
        states: number of states that a call may meet.
        rounds: fewest and most turns of each agent in an attempt.
        noise: deviation of what is added to each reward that is told.
    """

    shares: Mapping[str, float] = field(default_factory=lambda: SHARES)
    states: int = 3
    rounds: tuple[int, int] = (2, 4)
    noise: float = 0.1


@dataclass
class Policy:
    """A logit for each agent and state: how likely the good action is."""

    team: Team
    logits: dict[tuple[str, int], float] = field(default_factory=dict)

    def good(self, agent: str, state: int) -> float:
        return 1.0 / (1.0 + math.exp(-self.logits.get((agent, state), 0.0)))

    @property
    def reward(self) -> float:
        """The share of what the team could contribute that it does contribute, in the mean."""
        shares = self.team.shares
        did = sum(share * self.good(agent, s) for agent, share in shares.items() for s in range(self.team.states))
        return did / (self.team.states * sum(shares.values()))


@dataclass(frozen=True)
class Call:
    """One call of an attempt: whether its action was good, and what that contributed beyond what was to be expected."""

    agent: str
    state: int
    good: bool
    truth: float


def roll(policy: Policy, told: Told, name: str, numbers: np.random.Generator):
    """Play one attempt: its calls, their transitions, and the rewards that are told."""
    team, ids = policy.team, {"rollout_id": name, "attempt_id": name}
    rounds = int(numbers.integers(team.rounds[0], team.rounds[1] + 1))
    whole = sum(team.shares.values()) * rounds
    calls, transitions, rewards = [], [], []
    order = [agent for _ in range(rounds) for agent in numbers.permutation([*team.shares]).tolist()]
    for turn, agent in enumerate(order):
        state, share = int(numbers.integers(team.states)), team.shares[agent] / whole
        chance = policy.good(agent, state)
        good = bool(numbers.random() < chance)
        calls.append(Call(agent, state, good, share * (good - chance)))
        request = {"messages": [{"role": "user", "content": f"{agent} {state}"}]}
        span_id = f"{name}-{turn}"
        transitions.append(Transition(agent=agent, turn=turn, span_id=span_id, request=request, **ids))
        if told == "steps":
            value = share * good + numbers.normal(0.0, team.noise / math.sqrt(len(team.shares) * rounds))
            rewards.append(Reward(agent=agent, span_id=span_id, value=float(value), source="step", **ids))
    if told != "steps":
        earned: dict[str | None, float] = {}
        for whom in ([None] if told in ("team", "both") else []) + ([*team.shares] if told != "team" else []):
            mine = (call for call in calls if whom in (None, call.agent))
            earned[whom] = sum(call.good * team.shares[call.agent] / whole for call in mine)
        rewards = [
            Reward(agent=agent, value=float(value + numbers.normal(0.0, team.noise / math.sqrt(len(earned)))), **ids)
            for agent, value in earned.items()
        ]
    return calls, transitions, rewards


def advantages_of(attempts, groups: Sequence[str], credit) -> np.ndarray:
    """Advantages of all calls of these attempts, as `algorithms.rl` makes them."""
    levels = [levels_of(credit(transitions, rewards)) for _, transitions, rewards in attempts]
    transitions = [transition for _, own, _ in attempts for transition in own]
    group_M = [group for (_, own, _), group in zip(attempts, groups, strict=True) for _ in own]
    total = np.zeros(len(transitions))
    for number, first in enumerate(levels[0]):
        values = np.concatenate([own[number].values for own in levels])
        places = [
            place
            for own, (_, its, _) in zip(levels, attempts, strict=True)
            for place in own[number].places or [""] * len(its)
        ]
        total += first.weight * transition_advantages(
            values,
            range(len(values)) if first.by_step else [t.attempt_id for t in transitions],
            group_M,
            agent_M=[f"{t.agent}\0{place}" for t, place in zip(transitions, places, strict=True)],
            normalise=False,  # in the units of the reward: by its deviation, a free rider's noise looks like work
        )
    return total


def step(policy: Policy, told: Told, credit, numbers: np.random.Generator):
    """Roll out groups and judge them: all calls, and their advantages."""
    groups = [f"g{group}" for group in range(GROUPS) for _ in range(GROUP)]
    attempts = [roll(policy, told, f"{group}-{n}", numbers) for n, group in enumerate(groups)]
    return [call for calls, _, _ in attempts for call in calls], advantages_of(attempts, groups, credit)


def rollouts_to_goal(team: Team, told: Told, credit, seed: int, rate: float = 6.0) -> float:
    """Rollouts until the policy's reward reaches the goal; infinity when it does not within `LONGEST` steps."""
    policy, numbers = Policy(team), np.random.default_rng(seed)
    for number in range(LONGEST):
        calls, advantages = step(policy, told, credit, numbers)
        advantages /= np.sqrt(np.mean(advantages**2)) or 1.0  # steps of one size, whatever the assigner's units
        change: dict[tuple[str, int], float] = {}
        for call, advantage in zip(calls, advantages, strict=True):
            key = (call.agent, call.state)
            slope = call.good - policy.good(*key)  # of the log-probability of what was done
            change[key] = change.get(key, 0.0) + rate * float(advantage) * slope / len(calls)
        for key, amount in change.items():
            policy.logits[key] = policy.logits.get(key, 0.0) + amount
        if policy.reward >= GOAL:
            return (number + 1) * GROUP * GROUPS
    return math.inf


def agreement(team: Team, told: Told, credit, seeds: Sequence[int]) -> tuple[float, float]:
    """How well advantages agree with what calls contributed: rank correlation, and what the free riders get.

    The latter is the mean size of their advantages over that of the others': 0 is just, 1 makes no difference.
    """
    correlations, shares = [], []
    for seed in seeds:
        calls, advantages = step(Policy(team), told, credit, np.random.default_rng(seed))
        idle = np.array([team.shares[call.agent] == 0.0 for call in calls])
        correlations.append(rank_correlation(advantages, np.array([call.truth for call in calls])))
        shares.append(np.abs(advantages[idle]).mean() / max(np.abs(advantages[~idle]).mean(), 1e-12))
    return float(np.mean(correlations)), float(np.mean(shares))


def cosine(team: Team, told: Told, credit, seeds: Sequence[int]) -> float:
    """Mean cosine of an update of the first policy with the exact gradient, which calls' contributions give."""

    def direction(calls: Sequence[Call], advantages: Sequence[float]) -> np.ndarray:
        change = dict.fromkeys(((agent, state) for agent in team.shares for state in range(team.states)), 0.0)
        for call, advantage in zip(calls, advantages, strict=True):
            change[call.agent, call.state] += float(advantage) * (call.good - 0.5)
        return np.array([*change.values()])

    numbers = np.random.default_rng(10**6)
    many = [call for n in range(2000) for call in roll(Policy(team), "team", str(n), numbers)[0]]
    exact = direction(many, [call.truth for call in many])
    updates = [direction(*step(Policy(team), told, credit, np.random.default_rng(seed))) for seed in seeds]
    sizes = [float(np.linalg.norm(update) * np.linalg.norm(exact)) or 1.0 for update in updates]
    return float(np.mean([update @ exact / size for update, size in zip(updates, sizes, strict=True)]))


def rank_correlation(left: np.ndarray, right: np.ndarray) -> float:
    """Spearman's, with the mean rank for ties."""
    ranks = []
    for values in (left, right):
        _, places, counts = np.unique(np.round(values, 12), return_inverse=True, return_counts=True)
        ranks.append((np.cumsum(counts) - (counts - 1) / 2)[places])
    if np.ptp(ranks[0]) == 0 or np.ptp(ranks[1]) == 0:
        return 0.0
    return float(np.corrcoef(*ranks)[0, 1])


def assigners() -> dict[str, object]:
    """Every assigner under its name, with its own defaults."""
    return {name: credit_by_name(name) for name in ("identical", "discounted", "last", "per-agent", "turn", "gigpo")}
