"""The order of tasks: a curriculum has more groups with signal, forgets nothing it needs, and follows from the seed."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_trainer.rl.scores import Score, task_digest
from lightning_trainer.run.collecting.curriculum import FLOOR, Estimates, learn, sample, weight
from lightning_trainer.run.collecting.order import TaskOrder
from lightning_trainer.run.data import batch_at

TASKS = [{"q": n} for n in range(40)]
ROWS: Any = [SimpleNamespace(agent="writer", policy="writer")]


def order(estimates: Estimates, **options: Any) -> TaskOrder:
    config: Any = SimpleNamespace(**{"task_order": "curriculum", "batch_size": 8, "group_size": 8, "seed": 0} | options)
    return TaskOrder(config, TASKS, estimates)


def test_tasks_that_are_solved_sometimes_weigh_most_and_none_weighs_nothing() -> None:
    known = learn({}, {"writer": {"hard": 0.0, "half": 0.5, "easy": 1.0}}, 100)
    assert weight(known, "new") == weight({}, "new") == 0.25
    assert weight(known, "half") == pytest.approx(0.25)
    assert weight(known, "hard") == weight(known, "easy") == FLOOR
    for _ in range(4):  # the policy has learned it
        known = learn(known, {"writer": {"hard": 0.5}}, 8)
    assert weight(known, "hard") > 0.2


def test_the_first_pass_takes_every_task_once_and_later_ones_those_that_teach() -> None:
    its, taken = order({}), []
    for step in range(5):
        assert its.places(step) == batch_at(step, 40, 8, 0)
        taken += its.places(step)
    assert sorted(taken) == list(range(40))
    rewards = {task_digest(task): float(n % 4 == 0) / 2 for n, task in enumerate(TASKS)}
    estimates = its.learn(Score(reward=0.1, by_task={"": rewards}), ROWS)
    its.learn(Score(reward=0.1, by_task={"": rewards}), ROWS)
    drawn = [place for step in range(5, 45) for place in its.places(step)]
    assert all(len(set(its.places(step))) == 8 for step in range(5, 45))
    assert sum(place % 4 == 0 for place in drawn) / len(drawn) > 0.5  # a quarter of the tasks
    assert set(drawn) == set(range(40))
    again = order(estimates)
    again.learn(Score(reward=0.1, by_task={"": rewards}), ROWS)
    assert [again.places(step) for step in range(5, 15)] == [its.places(step) for step in range(5, 15)]
    others = its.others(4, its.places(9), "0/9/1")
    assert not set(others) & set(its.places(9))
    assert order({}, task_order="shuffled").places(9) == batch_at(9, 40, 8, 0)


def rollouts_until(goal: float, seed: int, *, curriculum: bool, centre: float) -> tuple[int, float]:
    """Train one skill, and what is special of each of 400 tasks, until the mean success; count what that takes.

    Returns:
        Rollouts, and the share of groups in which rewards differed.
    """
    numbers, estimates = random.Random(seed), Estimates()
    difficulty = [numbers.gauss(centre, 4.0) for _ in range(400)]
    own, skill, live, groups = [0.0] * 400, 0.0, 0, 0

    def success(task: int) -> float:
        return 1 / (1 + math.exp(difficulty[task] - own[task] - skill))

    for step in range(2000):
        if sum(map(success, range(400))) / 400 >= goal:
            break
        late = curriculum and (step + 1) * 8 > 400
        weights = {task: weight(estimates, f"{task}") for task in range(400)} if late else {}
        tasks = sample(weights, 8, f"{seed}/{step}") if late else batch_at(step, 400, 8, seed)
        means = {task: sum(numbers.random() < success(task) for _ in range(8)) / 8 for task in tasks}
        for task, mean in means.items():
            skill, own[task] = skill + 0.02 * mean * (1 - mean), own[task] + 0.4 * mean * (1 - mean)
        live, groups = live + sum(0 < mean < 1 for mean in means.values()), groups + 8
        estimates = learn(estimates, {"writer": {f"{task}": mean for task, mean in means.items()}}, 8)
    return 8 * groups, live / groups


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("goal", "centre", "fewer"), [(0.75, 2.5, 0.77), (0.5, 5.0, 0.7)])
def test_a_curriculum_reaches_the_same_reward_with_fewer_rollouts(
    seed: int, goal: float, centre: float, fewer: float
) -> None:
    shuffled, alive = rollouts_until(goal, seed, curriculum=False, centre=centre)
    sampled, more = rollouts_until(goal, seed, curriculum=True, centre=centre)
    assert sampled < fewer * shuffled
    assert more > alive + 0.08
