"""Shapley values over agents: sampled ones are those of every order, and calls are credited with them."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from lightning_spans.errors import ConfigError
from lightning_spans.schema.attempts import AttemptRecord, Rollout
from lightning_spans.schema.replays import Replay
from lightning_trainer.kits.forks.steps import agent_shares
from lightning_trainer.rl.batch.attempts import played_of
from lightning_trainer.rl.credit.assigners import credit_by_name
from lightning_trainer.rl.credit.played import Fork, PlayedAttempt
from lightning_trainer.rl.credit.shapley import (
    Share,
    agent_contributions,
    coalitions,
    orders,
    shares,
    task_means,
    values_of,
)
from lightning_trainer.rl.rollouts import Outcome

TEAM = ("planner", "writer", "checker", "rider")


def game(some: frozenset[str]) -> float:
    """A checker is worth something beside a writer, a writer more beside a planner, and a rider nothing."""
    reward = 1.0 * ("planner" in some) + 2.0 * ("writer" in some)
    return reward + 3.0 * ({"planner", "writer"} <= some) + 1.5 * ({"writer", "checker"} <= some)


def exact() -> dict[str, float]:
    """The mean over all orders."""
    means = dict.fromkeys(TEAM, 0.0)
    every = list(itertools.permutations(TEAM))
    for order in every:
        for agent, (before, after) in zip(order, itertools.pairwise(map(game, coalitions(order))), strict=True):
            means[agent] += (after - before) / len(every)
    return means


def sampled(count: int, numbers: random.Random, reward: Callable[[frozenset[str]], float] = game) -> dict[str, float]:
    drawn = {some for order in orders(TEAM, count, numbers) for some in coalitions(order)}
    return values_of({some: reward(some) for some in drawn})


def test_with_every_coalition_the_values_are_the_means_over_all_orders() -> None:
    every = [frozenset(some) for n in range(5) for some in itertools.combinations(TEAM, n)]
    assert values_of({some: game(some) for some in every}) == pytest.approx(exact())
    assert exact()["rider"] == 0.0


def test_what_agents_got_is_what_the_team_gained() -> None:
    found = sampled(4, random.Random(0))
    assert sum(found.values()) == pytest.approx(game(frozenset(TEAM)) - game(frozenset()))
    assert found["rider"] == 0.0


def test_standard_errors_say_how_far_sampled_values_are_off() -> None:
    noise, numbers, off = np.random.default_rng(0), random.Random(0), []
    for _ in range(200):
        samples = [sampled(2, numbers, lambda some: game(some) + noise.normal(0.0, 0.5)) for _ in range(20)]
        found = shares(samples)
        off += [(found[agent].value - value) / found[agent].error for agent, value in exact().items()]
    assert np.mean(off) == pytest.approx(0.0, abs=0.15)
    assert np.std(off) == pytest.approx(1.0, abs=0.15)


def test_a_single_sample_knows_nothing_of_its_error() -> None:
    (share,) = shares([{"a": 2.0}]).values()
    assert share.value == 2.0
    assert math.isnan(share.error)
    assert shares([{"a": 2.0}, {"a": 4.0}]) == {"a": Share(3.0, 1.0)}


def test_orders_come_in_pairs_and_again_with_the_same_numbers() -> None:
    drawn = orders(TEAM, 6, random.Random(1))
    assert drawn == orders(TEAM, 6, random.Random(1))
    assert all(drawn[n] == drawn[n + 1][::-1] for n in (0, 2, 4))
    with pytest.raises(ValueError, match="even number"):
        orders(TEAM, 3, random.Random(0))
    with pytest.raises(ValueError, match="named twice"):
        orders(("a", "a"), 2, random.Random(0))


def attempt(name: str, earned: float, *without: str, record: str | None = None) -> PlayedAttempt:
    fork = None if record is None else Fork(record, None, frozenset(without))
    return PlayedAttempt(attempt_id=name, transitions=(), earned=earned, group="g", fork=fork)


def test_an_agent_adds_what_the_reward_changes_by_when_it_joins() -> None:
    both, nobody = attempt("r", 1.0), attempt("n", 0.1, "a", "b", record="r")
    with_a, with_b = attempt("a", 0.8, "b", record="r"), attempt("b", 0.2, "a", record="r")
    alone = attempt("other", 5.0)  # of which nothing was run again
    found = agent_contributions([both, nobody, with_a, with_b, alone])
    assert found == {"r": pytest.approx({"a": 0.5 * (0.7 + 0.8), "b": 0.5 * (0.1 + 0.2)})}


def test_rollouts_of_one_task_count_once() -> None:
    """What the agent adds differs between tasks, and not between the rollouts of one."""
    played = []
    for task, added in enumerate((0.0, 1.0)):
        for number in range(8):
            name = f"{task}-{number}"
            its = [attempt(name, added), attempt(f"{name}n", 0.0, "a", record=name)]
            played += [replace(each, group=f"g{task}") for each in its]
    assert shares(task_means(played)) == {"a": Share(0.5, 0.5)}
    assert agent_shares(played) == {"shapley/a": 0.5, "shapley_error/a": 0.5}


def test_of_a_rollout_of_which_a_coalition_is_missing_nothing_is_known() -> None:
    both, with_a, with_b = attempt("r", 1.0), attempt("a", 0.8, "b", record="r"), attempt("b", 0.2, "a", record="r")
    assert agent_contributions([both, with_a, with_b]) == {}  # what the base earns alone is not known
    lonely = replace(with_b, fork=Fork("r", None, frozenset("a"), frozenset("ab")))
    assert agent_contributions([both, lonely]) == {}  # an agent without the others is no team
    nobody = attempt("n", 0.1, "a", "b", record="r")
    assert agent_contributions([both, nobody, with_a]) == {
        "r": pytest.approx({"a": 0.7, "b": 0.2})
    }  # of the order a, b


def test_the_team_is_that_of_all_coalitions_whatever_became_of_them() -> None:
    def outcome(name: str, *without: str, ended: bool = False) -> Outcome:
        replay = Replay(attempt_id="r.1", beyond="sample", fresh=without) if without else None
        rollout = Rollout(rollout_id=name, group_id="g", task={}, replay=replay)
        its = AttemptRecord(attempt_id=f"{name}.1", rollout=rollout, number=1, fence=1, worker="w", status="succeeded")
        return Outcome(rollout=rollout, attempt=None if ended else its, attempts=(its,))

    some = [outcome("r"), outcome("n", "a", "b", ended=True), outcome("x", "b", ended=True), outcome("y", "a")]
    record, fork = played_of(some, lambda _: [], "lowest")
    assert (record.fork, fork.fork) == (None, Fork("r.1", None, frozenset("a"), frozenset("ab")))
    assert agent_contributions([record, fork]) == {}


def test_it_is_a_measure_and_no_credit() -> None:
    with pytest.raises(ConfigError, match=r"can point away from the gradient\. Set orders = 2"):
        credit_by_name("shapley")
