"""Who of a team earned what it earns: Shapley values over agents, sampled, each with its standard error.

A coalition is the agents that are let do what they learned; for the others the frozen base answers. Agents join one
after the other, in a random order, and each is credited with what the team's reward changed by when it joined
(Castro, Gomez and Tejada, 2009). So what all agents got is what the team gained over the base, in every order.

`orders` draws orders, `coalitions` says what is to be run for one, and `shares` reads the rewards of those runs.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Share:
    """What an agent adds to the reward of its team.

    Attributes:
        value: the mean over orders of what it added.
        error: standard error of that mean; NaN with fewer than two pairs of orders, of which nothing is known.
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


def coalitions(order: Sequence[str]) -> list[frozenset[str]]:
    """Return what is to be run for an order: nobody, then one agent more each time, to all of them."""
    return [frozenset(order[:n]) for n in range(len(order) + 1)]


def shares(drawn: Sequence[Sequence[str]], rewards: Sequence[Sequence[float]]) -> dict[str, Share]:
    """Say what each agent adds, of the rewards of the coalitions that were run.

    Args:
        drawn: `orders`, each beside its reverse.
        rewards: for each order the rewards of its `coalitions`, one run or the mean of several each.

    Returns:
        By agent; the values add up to what the team gained over the base, in the mean over orders.

    Raises:
        ValueError: an order has another number of rewards than coalitions.
    """
    added: dict[str, list[float]] = {agent: [] for agent in (drawn[0] if drawn else ())}
    for order, its in zip(drawn, rewards, strict=True):
        if len(its) != len(order) + 1:
            raise ValueError(f"{len(its)} rewards for {len(order) + 1} coalitions")
        for agent, (before, after) in zip(order, itertools.pairwise(its), strict=True):
            added[agent].append(after - before)
    return {agent: _share(its) for agent, its in sorted(added.items())}


def _share(added: Sequence[float]) -> Share:
    # An order and its reverse are no independent draws, their mean is one.
    pairs = np.asarray(added, np.float64).reshape(-1, 2).mean(axis=1)
    error = float(pairs.std(ddof=1)) / math.sqrt(len(pairs)) if len(pairs) > 1 else math.nan
    return Share(float(pairs.mean()), error)


def exact(agents: Sequence[str], reward: Callable[[frozenset[str]], float]) -> dict[str, float]:
    """Return the Shapley values of a game whose every coalition is known: 2**n of them, so for small teams.

    Args:
        agents: n of them.
        reward: of each coalition.
    """
    every = (frozenset(some) for n in range(len(agents) + 1) for some in itertools.combinations(agents, n))
    worth = {some: reward(some) for some in every}
    ways = [math.factorial(n) * math.factorial(len(agents) - n - 1) for n in range(len(agents))]  # to join after n
    return {
        agent: sum(
            ways[len(some)] / math.factorial(len(agents)) * (worth[some | {agent}] - before)
            for some, before in worth.items()
            if agent not in some
        )
        for agent in agents
    }
