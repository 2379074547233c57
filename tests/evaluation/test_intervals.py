"""The one interval: how often it holds the truth, through `eval`'s own summary, and how wide it is."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence

import pytest

from lightning_trainer.intervals import estimate_difference, estimate_mean, reward_bounds
from lightning_trainer.kits.evaluation.samples import Sample
from lightning_trainer.kits.evaluation.summary import Counting, Summary, difference, summarise

Draw = Callable[[random.Random], list[float]]  # the rewards of one task's samples


def summary_of(tasks: Sequence[Sequence[float]]) -> Summary:
    """Return what `eval` makes of the rewards of each task's samples."""
    samples = [
        Sample(task=task, sample=number, rollout_id=f"{task}-{number}", attempt_id="a", status="succeeded", reward=each)
        for task, rewards in enumerate(tasks)
        for number, each in enumerate(rewards)
    ]
    return summarise(samples, Counting())


def coverage(draw: Draw, truth: float, tasks: int, times: int = 200) -> float:
    numbers = random.Random(f"{truth}/{tasks}")
    found = [summary_of([draw(numbers) for _ in range(tasks)]).reward for _ in range(times)]
    assert all(each.low < each.high for each in found)
    return statistics.fmean(each.low <= truth <= each.high for each in found)


def least(tasks: int) -> float:
    return 0.93 if tasks >= 10 else 0.90


@pytest.mark.parametrize("tasks", [5, 10, 20, 50])
def test_the_interval_of_0_and_1_holds_the_truth_whatever_it_is(tasks: int):
    ends = [summary_of([[float(task < good)] for task in range(tasks)]).reward for good in range(tasks + 1)]
    assert all(each.low < each.high for each in ends)
    for truth in (0.01, 0.05, 0.2, 0.5, 0.72, 0.77, 0.8, 0.9, 0.95, 0.99):
        chances = [math.comb(tasks, k) * truth**k * (1 - truth) ** (tasks - k) for k in range(tasks + 1)]
        covered = sum(c for c, each in zip(chances, ends, strict=True) if each.low <= truth <= each.high)
        assert covered >= least(tasks), truth


def clustered(mean: float, alike: float, samples: int) -> Draw:
    """Return 0/1 rewards of tasks that differ: the smaller `alike`, the more the samples of a task are the same."""

    def draw(numbers: random.Random) -> list[float]:
        chance = numbers.betavariate(mean * alike, (1 - mean) * alike)
        return [float(numbers.random() < chance) for _ in range(samples)]

    return draw


def graded(a: float, b: float, crashes: float = 0.0) -> Draw:
    return lambda numbers: [0.0 if numbers.random() < crashes else numbers.betavariate(a, b)]


@pytest.mark.parametrize("tasks", [5, 10, 30])
@pytest.mark.parametrize(
    ("draw", "truth"),
    [
        pytest.param(clustered(0.95, 2.0, 4), 0.95, id="95 %, samples alike"),
        pytest.param(clustered(0.8, 1e6, 4), 0.8, id="80 %, samples independent"),
        pytest.param(clustered(0.99, 1e6, 2), 0.99, id="99 %, two samples"),
        pytest.param(graded(2, 2), 0.5, id="graded"),
        pytest.param(graded(9.5, 0.5), 0.95, id="graded, most near 1"),
        pytest.param(graded(20, 2, crashes=0.1), 20 / 22 * 0.9, id="graded, with crashes"),
    ],
)
def test_the_interval_holds_the_truth_of_clustered_and_graded_rewards(draw: Draw, truth: float, tasks: int):
    assert coverage(draw, truth, tasks) >= least(tasks)


def test_the_interval_is_hardly_wider_than_it_must_be():
    def width(rewards: Sequence[Sequence[float]]) -> float:
        found = summary_of(rewards).reward
        return found.high - found.low

    numbers = random.Random(0)
    for tasks, most in ((10, 1.2), (50, 1.1)):
        wilson, ours = [], []
        for _ in range(100):
            rewards = [float(numbers.random() < 0.8) for _ in range(tasks)]
            share, z2 = statistics.fmean(rewards), 1.96**2
            ours.append(width([[each] for each in rewards]))
            wilson.append(2 * math.sqrt(z2 * (share * (1 - share) / tasks + z2 / 4 / tasks**2)) / (1 + z2 / tasks))
        assert statistics.fmean(ours) < most * statistics.fmean(wilson)
    draw = clustered(0.8, 1e6, 4)
    assert statistics.fmean(width([draw(numbers) for _ in range(20)]) for _ in range(50)) < 1.4 * 0.185  # Student's


def test_the_interval_of_0_and_1_is_that_of_clopper_and_pearson():
    found = estimate_mean([1.0] * 9 + [0.0])
    assert (found.low, found.high) == (pytest.approx(0.55498, abs=1e-4), pytest.approx(0.99747, abs=1e-4))
    low = estimate_mean([1.0] * 8).low
    assert low == pytest.approx(0.025 ** (1 / 8), abs=1e-4)


def test_rewards_beyond_0_and_1_have_the_same_interval_on_their_own_scale():
    rewards = [-1.0] * 3 + [1.0] * 7
    own, unit = estimate_mean(rewards, reward_bounds(rewards)), estimate_mean([(r + 1) / 2 for r in rewards])
    assert own.low <= 2 * unit.low - 1
    assert own.high >= 2 * unit.high - 1
    assert estimate_mean([5.0] * 8, reward_bounds([5.0])).low < 5.0
    assert estimate_mean([]).mean is None


def test_a_declared_range_bounds_the_interval_and_a_failure_below_it_widens_it():
    rewards = [-0.5, 0.25, 1.0, 0.5]
    own = estimate_mean(rewards, reward_bounds(rewards, (-1.0, 1.0)))
    unit = estimate_mean([(r + 1) / 2 for r in rewards])
    assert (own.low, own.high) == (pytest.approx(2 * unit.low - 1), pytest.approx(2 * unit.high - 1))
    assert estimate_mean([0.5] * 5, reward_bounds([0.5] * 5, (0.0, 10.0))).high > 1.0
    assert reward_bounds([0.0], (1.0, 5.0))[:2] == (0.0, 5.0)
    assert estimate_difference([0.5] * 4, [0.5] * 4, (0.0, 10.0)).high > 1.0


Pairs = Callable[[random.Random], tuple[float, float]]  # one task's mean reward of both sides


def crashing(crashes: float, gain: float) -> Pairs:
    """Return graded rewards: this side is better by `gain` on every task, and sometimes crashes."""

    def draw(numbers: random.Random) -> tuple[float, float]:
        other = numbers.betavariate(20, 8)
        return 0.0 if numbers.random() < crashes else min(1.0, other + gain), other

    return draw


def losing(share: float, samples: int, rates: tuple[float, float], usual: tuple[float, float]) -> Pairs:
    """Return 0/1 rewards with different success rates of the two sides on a rare kind of task."""

    def draw(numbers: random.Random) -> tuple[float, float]:
        this, other = (
            statistics.fmean(numbers.random() < rate for _ in range(samples))
            for rate in (rates if numbers.random() < share else usual)
        )
        return this, other

    return draw


def partial(numbers: random.Random) -> tuple[float, float]:
    """Return rewards of a side that earns a little where the other earns nothing, and loses some solved tasks."""
    return (float(numbers.random() >= 0.1), 1.0) if numbers.random() < 0.5 else (0.08, 0.0)


@pytest.mark.parametrize("tasks", [10, 20, 40])
@pytest.mark.parametrize(
    ("draw", "truth"),
    [
        pytest.param(crashing(0.05, 0.03), 0.95 * 0.03 - 0.05 * 20 / 28, id="graded, 5 % crashes"),
        pytest.param(crashing(0.02, 0.012), 0.98 * 0.012 - 0.02 * 20 / 28, id="graded, 2 % crashes"),
        pytest.param(partial, 0.04 - 0.05, id="graded, loses solved tasks"),
        pytest.param(losing(0.08, 4, (0.02, 0.9), (0.97, 0.9)), -0.006, id="4 samples, one kind lost"),
        pytest.param(losing(0.08, 8, (0.02, 0.9), (0.97, 0.9)), -0.006, id="8 samples, one kind lost"),
        pytest.param(losing(0.05, 4, (0.0, 0.5), (0.045, 0.02)), -0.00125, id="4 samples, nearly all fail"),
        pytest.param(losing(0.05, 8, (0.98, 0.02), (0.9, 0.9)), 0.048, id="8 samples, one kind won"),
    ],
)
def test_a_paired_difference_allows_for_a_rare_loss_that_has_not_happened_yet(draw: Pairs, truth: float, tasks: int):
    numbers = random.Random(tasks)
    found = [estimate_difference(*zip(*(draw(numbers) for _ in range(tasks)), strict=True)) for _ in range(300)]
    assert statistics.fmean(each.low <= truth <= each.high for each in found) >= 0.94
    if truth < 0:
        assert statistics.fmean(each.low > 0 for each in found) <= 0.025


def test_a_clear_difference_of_several_samples_is_significant_with_40_tasks() -> None:
    numbers = random.Random(0)
    draw = losing(0.0, 4, (0.0, 0.0), (0.7, 0.5))
    found = [estimate_difference(*zip(*(draw(numbers) for _ in range(40)), strict=True)) for _ in range(100)]
    assert statistics.fmean(each.low > 0 for each in found) >= 0.8


def test_the_two_sides_of_a_paired_difference_have_the_same_interval() -> None:
    this, other = [0.25, 1.0, 0.5, 0.75, 0.0], [0.0, 0.5, 0.5, 1.0, 0.25]
    found, reverse = estimate_difference(this, other), estimate_difference(other, this)
    assert (found.low, found.high) == (pytest.approx(-reverse.high), pytest.approx(-reverse.low))


@pytest.mark.parametrize("tasks", [5, 10, 29])
def test_a_paired_difference_of_0_and_1_holds_the_truth(tasks: int):
    found = {}
    for up in range(tasks + 1):  # tasks that only this side solves; `down`: that only the other does
        for down in range(tasks + 1 - up):
            solved = [[float(task < up)] for task in range(tasks)]
            other = [[float(up <= task < up + down)] for task in range(tasks)]
            found[up, down], count = difference(summary_of(solved), summary_of(other))
            assert count == tasks
            assert found[up, down].low < found[up, down].high
    for this, other in ((0.5, 0.5), (0.8, 0.5), (0.95, 0.6), (0.99, 0.97), (0.9, 0.9)):
        rise, fall = this * (1 - other), other * (1 - this)
        covered = sum(
            math.comb(tasks, up) * math.comb(tasks - up, down) * rise**up * fall**down
            * (1 - rise - fall) ** (tasks - up - down)
            for (up, down), each in found.items()
            if each.low <= this - other <= each.high
        )  # fmt: skip
        assert covered >= least(tasks), (this, other)


def test_tasks_that_all_differ_alike_leave_a_doubt():
    none = estimate_difference([0.5] * 10, [0.5] * 10)
    assert (none.mean, none.low < 0 < none.high) == (0.0, True)
    few, many = (estimate_difference([0.6] * tasks, [0.5] * tasks) for tasks in (10, 40))
    assert few.low < 0 < many.low < 0.1 < many.high < few.high
    assert estimate_difference([1.0], [0.5]).low < 0.5


@pytest.mark.parametrize(("tasks", "significant"), [(1, False), (2, False), (5, False), (6, True)])
def test_the_largest_difference_is_significant_from_six_tasks_on_as_in_a_sign_test(
    tasks: int, significant: bool
) -> None:
    for sign in (1.0, -1.0):
        found = estimate_difference([max(0.0, sign)] * tasks, [max(0.0, -sign)] * tasks, (0.0, 1.0))
        assert found.mean == sign
        assert found.low is not None
        assert found.high is not None
        assert (not found.low <= 0.0 <= found.high) == significant
