"""How well rollouts did, for people: the mean reward, and the mean of each agent's."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final

from lightning_spans.schema.agents import earns, selects
from lightning_spans.schema.rewards import Reward
from lightning_trainer.intervals import Declared, Estimate, estimate_difference, estimate_mean, reward_bounds
from lightning_trainer.rl.rollouts import Failed, Outcome

BY_AGENT: Final = "reward/"  # before an agent's name: the metric of its own reward
BY_TASK: Final = "by_task"  # in the line of a validation


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """How well some rollouts did.

    Attributes:
        reward: mean over tasks of the mean of each task's rollouts; None if none of them counts.
        by_agent: the same of each agent's own rewards, if rewards were given by agent. A failure caused by the policy
            counts for every agent, because nothing says which of them caused it.
        rollouts: how many there were.
        failed: how many of them never succeeded, failed because of the policy before they did, or got no verdict.
        tasks: number of tasks of the rollouts that count; rollouts of one task are not independent samples.
        low, high: 95 % interval of `reward`, see `intervals`; None if nothing counts.
        reward_all: `reward` if the rollouts that do not count had earned 0; None without rollouts.
        by_task: the mean of each task's rollouts by a digest of the task, of `reward` under "" and of each agent.
        declared: range of the rewards.
    """

    reward: float | None
    by_agent: Mapping[str, float] = field(default_factory=dict)
    rollouts: int = 0
    failed: int = 0
    tasks: int = 0
    low: float | None = None
    high: float | None = None
    reward_all: float | None = None
    by_task: Mapping[str, Mapping[str, float]] = field(default_factory=dict, compare=False)
    declared: Declared = field(default=None, compare=False)

    @classmethod
    def from_metrics(cls, metrics: Mapping[str, Any], declared: Declared = None) -> Score:
        """Read the result of `metrics`, and `BY_TASK` if a line of a log has it; other numbers are ignored."""
        agents = {n.removeprefix(BY_AGENT): value for n, value in metrics.items() if n.startswith(BY_AGENT)}
        rollouts, failed = int(metrics.get("rollouts", 0)), int(metrics.get("failed", 0))
        return cls(
            reward=metrics.get("reward"),
            by_agent=agents,
            rollouts=rollouts,
            failed=failed,
            tasks=int(metrics.get("tasks", 0)),
            low=metrics.get("reward_low"),
            high=metrics.get("reward_high"),
            reward_all=metrics.get("reward_all"),
            by_task=metrics.get(BY_TASK, {}),
            declared=declared,
        )

    def metrics(self) -> dict[str, float]:
        """Return the score as numbers by name, for logs."""
        found = {"reward": self.reward, "reward_low": self.low, "reward_high": self.high, "reward_all": self.reward_all}
        known = {name: value for name, value in found.items() if value is not None}
        agents = {f"{BY_AGENT}{name}": value for name, value in self.by_agent.items()}
        counts = {"rollouts": self.rollouts, "failed": self.failed, "tasks": self.tasks}
        return {**known, **agents, **{name: float(count) for name, count in counts.items()}}


def score(
    outcomes: Sequence[Outcome], failed: Failed, agents: Sequence[str] | None = None, declared: Declared = None
) -> Score:
    """Average over tasks.

    Args:
        outcomes: of the rollouts.
        failed: the reward of one that failed because of the policy. Others that never succeeded are left out.
        agents: names and globs of the trained agents: `reward` is theirs, see `trained_reward`. None: of all.
        declared: range of the rewards, see `Work.declared`.
    """
    named = {reward.agent for outcome in outcomes for reward in outcome.rewards if reward.agent is not None}
    chosen = trained_names(named, agents)
    given: dict[str, dict[str, list[float]]] = {"": {}, **{name: {} for name in sorted(named)}}
    crashed = reward_of_failures(outcomes, failed)
    all_given: dict[str, list[float]] = {}
    for outcome in outcomes:
        counted = outcome.counts(failed)
        task = task_digest(outcome.rollout.task)  # a step may contain one several times
        if counted is None:
            all_given.setdefault(task, []).append(0.0)
            continue
        if counted is outcome.crash:
            values: Mapping[str, float | None] = dict.fromkeys(given, crashed)
        else:
            values = {**agents_totals(outcome.rewards), "": trained_reward(outcome.rewards, chosen)}
        for name, value in values.items():
            if value is not None:
                given[name].setdefault(task, []).append(value)
        if (reward := values[""]) is not None:
            all_given.setdefault(task, []).append(reward)
    by_task = {name: {task: sum(its) / len(its) for task, its in tasks.items()} for name, tasks in given.items()}
    bounds = reward_bounds((value for values in given[""].values() for value in values), declared)
    found = estimate_mean(list(by_task[""].values()), bounds)
    return Score(
        reward=found.mean,
        tasks=len(by_task[""]),
        low=found.low,
        high=found.high,
        reward_all=_mean([_mean(its) for its in all_given.values()]) if all_given else None,
        by_agent={name: sum(its.values()) / len(its) for name, its in by_task.items() if name and its},
        rollouts=len(outcomes),
        failed=sum(o.attempt is None or o.crash is not None or o.unjudged is not None for o in outcomes),
        by_task=by_task,
        declared=declared,
    )


def difference(this: Score, other: Score, agent: str = "") -> tuple[Estimate, int]:
    """Return how much higher the reward of one score is than another's of the same tasks, and on how many tasks.

    Args:
        this: of these rollouts.
        other: of the rollouts to compare with.
        agent: compare its own rewards; "" stands for the reward.
    """
    mine, its = this.by_task.get(agent, {}), other.by_task.get(agent, {})
    both = [task for task in mine if task in its]
    pairs = [mine[task] for task in both], [its[task] for task in both]
    return estimate_difference(*pairs, this.declared), len(both)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def task_digest(task: Mapping[str, Any]) -> str:
    """Return 12 hex digits that identify a task in `by_task`."""
    text = json.dumps(task, sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:12]


def trained_names(named: Iterable[str], agents: Sequence[str] | None) -> frozenset[str] | None:
    """Return the names in rewards that match trained agents; None if that is all of them, or none.

    Args:
        named: names and paths in rewards.
        agents: names and globs of the trained agents; None: all are.
    """
    names = frozenset(named)
    chosen = {n for n in names if any(selects((pattern,), n) or earns(n, pattern) for pattern in agents or ())}
    return None if agents is None or not chosen or chosen == names else frozenset(chosen)


def trained_reward(rewards: Sequence[Reward], chosen: frozenset[str] | None) -> float | None:
    """Return one number for an attempt: the reward of the trained agents.

    That is `total` without the rewards of others; None if there are only those.

    Args:
        rewards: of the attempt.
        chosen: see `trained_names`.
    """
    if chosen is None or not rewards:
        return total(rewards)
    theirs = [reward for reward in rewards if reward.agent is None or reward.agent in chosen]
    return total(theirs) if theirs else None


def rollout_rewards(
    outcomes: Sequence[Outcome], failed: Failed, agents: Sequence[str] | None = None
) -> dict[str, float]:
    """Return the reward of each rollout that counts, by its id; see `score` for the arguments, and `trained_reward`."""
    named = {reward.agent for outcome in outcomes for reward in outcome.rewards if reward.agent is not None}
    chosen, crashed = trained_names(named, agents), reward_of_failures(outcomes, failed)
    rewards = {
        outcome.rollout.rollout_id: crashed if counted is outcome.crash else trained_reward(outcome.rewards, chosen)
        for outcome in outcomes
        if (counted := outcome.counts(failed)) is not None
    }
    return {rollout_id: reward for rollout_id, reward in rewards.items() if reward is not None}


def reward_of_failures(outcomes: Sequence[Outcome], failed: Failed) -> float:
    """Return the reward of rollouts that failed because of the policy, if they are not left out."""
    if isinstance(failed, str):
        return min([0.0, *(lowest(o.rewards) for o in outcomes if o.attempt is not None and o.crash is None)])
    return failed


def lowest(rewards: Sequence[Reward]) -> float:
    """Return the lowest reward of any agent of an attempt, as credit assigns it, or the attempt's total."""
    return lowest_of(_team_sum(rewards), agents_totals(rewards).values())


def lowest_of(shared: float, own: Collection[float]) -> float:
    """Return the lowest reward of any agent, or the total: see `lowest`.

    Args:
        shared: rewards of the whole attempt.
        own: total of each agent's own rewards.
    """
    return min([_total(shared, own), *(shared + value for value in own)])


def rewards_of(names: Iterable[str], rewards: Sequence[Reward]) -> tuple[float, ...]:
    """Return the reward of each of these agents in an attempt, as credit assigns it; without names, the attempt's."""
    shared, own = _team_sum(rewards), agents_totals(rewards)
    return tuple(shared + own.get(name, 0.0) for name in names) or (shared,)


def total(rewards: Sequence[Reward]) -> float:
    """Return one number for an attempt: the rewards of the whole attempt, plus the mean over agents of their own."""
    return _total(_team_sum(rewards), agents_totals(rewards).values())


def _team_sum(rewards: Sequence[Reward]) -> float:
    return sum(reward.value for reward in rewards if reward.agent is None)


def _total(shared: float, own: Collection[float]) -> float:
    return shared + (sum(own) / len(own) if own else 0.0)


def by_source(outcomes: Sequence[Outcome], automatic: Sequence[Reward], failed: Failed) -> dict[str, float]:
    """Return the mean over the successes that count of each source's rewards, for logs: `reward_source/NAME`.

    Args:
        outcomes: of the rollouts.
        automatic: rewards of automatic rules, including those of other attempts such as forks.
        failed: the reward of a rollout that failed because of the policy; ``exclude`` leaves it out.
    """
    own = {o.attempt.attempt_id: o.rewards for o in outcomes if o.attempt is not None and o.counts(failed) is o.attempt}
    given = chain(chain.from_iterable(own.values()), (reward for reward in automatic if reward.attempt_id in own))
    totals: dict[str, float] = defaultdict(float)
    for reward in given:
        totals[f"reward_source/{reward.source}"] += reward.value / len(own)
    return dict(totals)


def agents_totals(rewards: Sequence[Reward]) -> dict[str, float]:
    """Add up the rewards of each agent."""
    totals: dict[str, float] = defaultdict(float)
    for reward in rewards:
        if reward.agent is not None:
            totals[reward.agent] += reward.value
    return dict(totals)


def constant_rewards(outcomes: Iterable[Outcome], agents: Iterable[str]) -> dict[str, float]:
    """Return the agents that got their own reward, and the same total in every successful rollout, with this total.

    Nothing is constant in a single rollout.
    """
    succeeded = [outcome.rewards for outcome in outcomes if outcome.attempt is not None]
    found = {}
    for agent in agents:
        own = [[each for each in rewards if earns(each.agent, agent)] for rewards in succeeded]
        totals = {sum(each.value for each in rewards) for rewards in own}
        if len(totals) == 1 < len(own) and any(each.agent is not None for each in own[0]):
            found[agent] = totals.pop()
    return found
