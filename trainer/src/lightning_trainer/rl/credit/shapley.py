"""What each agent adds to its team: Shapley values over agents, with the frozen base in place of those left out.

A coalition is the agents that answer as they learned to; for the others the frozen base answers. Agents join one after
the other, in a random order, and each adds what the team's reward changes by when it joins (Castro, Gomez and Tejada,
2009). So what all agents add is what the team gained over the base, in every order.

It is a measure. As training credit it can point away from the gradient: what an agent adds over the base says nothing
of which of its actions were better than its usual ones (docs/decisions/credit-methods.md).

For a rollout of a run, the coalition of all is the rollout itself. In the others its program runs again: an agent of
the coalition that is asked what it was asked in the rollout says what it said there, and the base says the same to the
same request in all coalitions of a rollout. So these differ by who takes part, and as little as can be by chance.

`orders` draws orders, `coalitions` says what is to be run for one, `added` what came of it.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lightning_trainer.rl.credit.played import Played

Coalition = frozenset[str]


@dataclass(frozen=True, slots=True)
class Share:
    """What an agent adds to the reward of its team.

    Attributes:
        value: the mean of what it added.
        error: standard error of that mean; NaN for a single sample, of which nothing is known.
    """

    value: float
    error: float


def orders(agents: Sequence[str], count: int, numbers: random.Random) -> list[tuple[str, ...]]:
    """Draw orders in which agents join, each followed by its reverse: what comes early in one comes late in the other.

    Args:
        agents: of the team.
        count: how many, even.
        numbers: the draw; the same numbers give the same orders.

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
    """Return what is to be run for an order: nobody, then one agent more each time, to all of them."""
    return [frozenset(order[:n]) for n in range(len(order) + 1)]


def values_of(worth: Mapping[Coalition, float]) -> dict[str, float]:
    """Return what each agent adds, in the mean over all orders whose every coalition is known.

    With the coalitions of random orders the mean over draws is the Shapley value: no agent is more likely to join
    early than another. With all 2**n coalitions it is the Shapley value itself.

    Args:
        worth: the reward of each coalition that is known; the largest is the whole team.

    Returns:
        By agent. The values add up to what the team gained over the base. Empty where no order is known whole.
    """
    team = max(worth, key=len, default=frozenset())
    # Orders are counted, not listed: those that lead to a coalition, times those that go on from it to the team.
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


def added(attempts: Sequence[Played]) -> dict[str, dict[str, float]]:
    """Return what each agent added in each rollout whose coalitions were run, by attempt and agent.

    Args:
        attempts: of a step; a fork whose record is not among them counts for nothing.
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


def shares(samples: Sequence[Mapping[str, float]]) -> dict[str, Share]:
    """Return the mean of what each agent added over samples that are independent of each other, with its error.

    Args:
        samples: by agent, of a rollout each; an agent need not be in all of them.
    """
    by_agent: defaultdict[str, list[float]] = defaultdict(list)
    for sample in samples:
        for agent, value in sample.items():
            by_agent[agent].append(value)
    return {agent: _share(values) for agent, values in sorted(by_agent.items())}


def _share(values: Sequence[float]) -> Share:
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return Share(float(np.mean(values)), error)
