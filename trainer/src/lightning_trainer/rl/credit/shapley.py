"""The contribution of each agent to its team: Shapley values over agents, with the frozen base replacing the others.

A coalition is the agents that answer with their trained weights; for the others the frozen base answers. Agents join
one after the other, in a random order, and each adds the change of the team's reward when it joins (Castro, Gomez and
Tejada, 2009). So the sum over agents is the team's gain over the base, in every order.

It is a measure. As training credit it can point away from the gradient: what an agent adds over the base does not say
which of its actions were better than its usual ones (docs/decisions/credit-methods.md).

For a rollout of a run, the coalition of all agents is the rollout itself. In the others its program runs again: an
agent of the coalition that gets the same request as in the rollout gives the same answer, and the base gives the same
answer to the same request in all coalitions of a rollout. So these differ by who takes part, and as little as possible
by chance.

`orders` samples orders, `coalitions` returns what to run for one, `agent_contributions` the outcomes.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lightning_trainer.rl.credit.played import PlayedAttempt

Coalition = frozenset[str]


@dataclass(frozen=True, slots=True)
class Share:
    """An agent's contribution to the reward of its team.

    Attributes:
        value: the mean of what it added.
        error: standard error of that mean; NaN for a single sample.
    """

    value: float
    error: float


def orders(agents: Sequence[str], count: int, numbers: random.Random) -> list[tuple[str, ...]]:
    """Sample orders in which agents join, each followed by its reverse: what is early in one is late in the other.

    Args:
        agents: of the team.
        count: how many, even.
        numbers: random numbers; the same ones give the same orders.

    Raises:
        ValueError: the count is odd or below 2, or an agent is named twice.
    """
    if count < 2 or count % 2:
        raise ValueError(f"{count} orders: they come in pairs, so give an even number of them")
    if len({*agents}) != len(agents):
        raise ValueError(f"an agent is named twice: {', '.join(agents)}")
    found = []
    for _ in range(count // 2):
        order = tuple(numbers.sample(list(agents), len(agents)))
        found += [order, order[::-1]]
    return found


def coalitions(order: Sequence[str]) -> list[Coalition]:
    """Return what to run for an order: no agent, then one more each time, up to all of them."""
    return [frozenset(order[:n]) for n in range(len(order) + 1)]


def values_of(worth: Mapping[Coalition, float]) -> dict[str, float]:
    """Return what each agent adds, averaged over all orders whose every coalition is known.

    With the coalitions of random orders the expected value is the Shapley value: no agent is more likely to join early
    than another. With all 2**n coalitions it is the Shapley value itself.

    Args:
        worth: the reward of each known coalition; the largest is the whole team.

    Returns:
        By agent. The values add up to the team's gain over the base. Empty if no order is completely known.
    """
    team = max(worth, key=len, default=frozenset())
    # Orders are counted, not listed: those that lead to a coalition, times those that continue from it to the team.
    ways_to: dict[Coalition, int] = {}
    for some in sorted(worth, key=len):
        ways_to[some] = sum(ways_to.get(some - {agent}, 0) for agent in some) if some else 1
    ways_on: dict[Coalition, int] = {}
    for some in sorted(worth, key=len, reverse=True):
        ways_on[some] = 1 if some == team else sum(ways_on.get(some | {agent}, 0) for agent in team - some)
    known = ways_to.get(team, 0)
    if not known or not team:
        return {}
    return {
        agent: sum(
            ways_to[some] * ways_on[some | {agent}] / known * (worth[some | {agent}] - before)
            for some, before in worth.items()
            if agent not in some and some | {agent} in worth
        )
        for agent in sorted(team)
    }


def agent_contributions(attempts: Sequence[PlayedAttempt]) -> dict[str, dict[str, float]]:
    """Return what each agent added in each rollout whose coalitions were run, by attempt and agent.

    Args:
        attempts: of a step; a fork whose record is not among them is ignored.
    """
    without: defaultdict[str, defaultdict[Coalition, list[float]]] = defaultdict(lambda: defaultdict(list))
    teams: defaultdict[str, Coalition] = defaultdict(frozenset)
    for attempt in attempts:
        if (fork := attempt.fork) is not None and fork.without:
            without[fork.record][fork.without].append(attempt.earned)
            teams[fork.record] |= fork.without | fork.team
    found = {}
    for attempt in attempts:
        if attempt.fork is None and (its := without.get(attempt.attempt_id)):
            team = teams[attempt.attempt_id]
            worth = {team - left_out: float(np.mean(earned)) for left_out, earned in its.items()}
            if values := values_of({**worth, team: attempt.earned}):
                found[attempt.attempt_id] = values
    return found


def task_means(attempts: Sequence[PlayedAttempt]) -> list[dict[str, float]]:
    """Return the mean of what each agent added in the rollouts of each task, because these are not independent."""
    added = agent_contributions(attempts)
    by_group: defaultdict[str, defaultdict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for attempt in attempts:
        for agent, value in added.get(attempt.attempt_id, {}).items():
            by_group[attempt.group][agent].append(value)
    return [{agent: float(np.mean(values)) for agent, values in group.items()} for group in by_group.values()]


def shares(samples: Sequence[Mapping[str, float]]) -> dict[str, Share]:
    """Return the mean of what each agent added over independent samples, with its error.

    Args:
        samples: by agent, one per task; an agent need not be in all of them.
    """
    by_agent: defaultdict[str, list[float]] = defaultdict(list)
    for sample in samples:
        for agent, value in sample.items():
            by_agent[agent].append(value)
    return {agent: _share(values) for agent, values in sorted(by_agent.items())}


def _share(values: Sequence[float]) -> Share:
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return Share(float(np.mean(values)), error)
