"""Shapley values over agents: sampled ones are those of every order, within their standard errors."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable

import numpy as np
import pytest

from lightning_trainer.rl.credit.shapley import Share, coalitions, exact, orders, shares

TEAM = ("planner", "writer", "checker", "rider")


def game(some: frozenset[str]) -> float:
    """A checker is worth something beside a writer, a writer more beside a planner, and a rider nothing."""
    reward = 1.0 * ("planner" in some) + 2.0 * ("writer" in some)
    return reward + 3.0 * ({"planner", "writer"} <= some) + 1.5 * ({"writer", "checker"} <= some)


def sampled(count: int, seed: int, reward: Callable[[frozenset[str]], float]) -> dict[str, Share]:
    drawn = orders(TEAM, count, random.Random(seed))
    return shares(drawn, [[reward(some) for some in coalitions(order)] for order in drawn])


def test_exact_values_are_the_means_over_all_orders() -> None:
    every = list(itertools.permutations(TEAM))
    means = dict.fromkeys(TEAM, 0.0)
    for order in every:
        for agent, (before, after) in zip(order, itertools.pairwise(map(game, coalitions(order))), strict=True):
            means[agent] += (after - before) / len(every)
    assert exact(TEAM, game) == pytest.approx(means)
    assert means["rider"] == 0.0


def test_what_agents_got_is_what_the_team_gained() -> None:
    found = sampled(4, 0, game)
    assert sum(share.value for share in found.values()) == pytest.approx(game(frozenset(TEAM)) - game(frozenset()))
    assert found["rider"] == Share(0.0, 0.0)


def test_standard_errors_say_how_far_sampled_values_are_off() -> None:
    noise = np.random.default_rng(0)
    known = exact(TEAM, game)
    off = []
    for seed in range(200):
        found = sampled(40, seed, lambda some: game(some) + noise.normal(0.0, 0.5))
        off += [(found[agent].value - known[agent]) / found[agent].error for agent in TEAM]
    assert np.mean(off) == pytest.approx(0.0, abs=0.15)
    assert np.std(off) == pytest.approx(1.0, abs=0.15)


def test_a_single_pair_of_orders_knows_nothing_of_its_error() -> None:
    assert all(math.isnan(share.error) for share in sampled(2, 0, game).values())


def test_orders_come_in_pairs_and_again_with_the_same_numbers() -> None:
    drawn = orders(TEAM, 6, random.Random(1))
    assert drawn == orders(TEAM, 6, random.Random(1))
    assert all(drawn[n] == drawn[n + 1][::-1] for n in (0, 2, 4))
    with pytest.raises(ValueError, match="even number"):
        orders(TEAM, 3, random.Random(0))
    with pytest.raises(ValueError, match="named twice"):
        orders(("a", "a"), 2, random.Random(0))
    with pytest.raises(ValueError, match="3 rewards for 5 coalitions"):
        shares(drawn[:1], [[0.0] * 3])
