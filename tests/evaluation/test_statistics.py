"""The numbers of an evaluation: against brute force, and against the definitions."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_spans.schema.attempts import AttemptRecord, Rollout
from lightning_spans.schema.rewards import Reward
from lightning_trainer.kits.evaluation.passes import pass_all, pass_at
from lightning_trainer.kits.evaluation.samples import Sample, Usage
from lightning_trainer.kits.evaluation.summary import (
    Counting,
    difference,
    differences_by_agent,
    join_equal_tasks,
    summarise,
    summarise_each,
)
from lightning_trainer.rl.rollouts import Outcome
from lightning_trainer.rl.scores import score


@given(st.integers(1, 7).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_and_pass_all_are_shares_of_all_ways_to_choose_k(case):
    n, c, k = case
    chosen = list(itertools.combinations([True] * c + [False] * (n - c), k))
    assert pass_at(n, c, k) == pytest.approx(sum(map(any, chosen)) / len(chosen))
    assert pass_all(n, c, k) == pytest.approx(sum(map(all, chosen)) / len(chosen))


def test_more_samples_are_asked_for_than_there_are():
    with pytest.raises(ValueError, match="k = 3 of 2 samples"):
        pass_at(2, 1, 3)


def sample(task: int, number: int, reward: float | None, status: str = "succeeded", **more) -> Sample:
    return Sample(
        task=task, sample=number, rollout_id=f"r{task}-{number}", attempt_id="a", status=status, reward=reward, **more
    )


def test_samples_of_a_task_are_averaged_before_tasks_are():
    found = summarise([sample(0, 0, 1.0), sample(0, 1, 0.0), sample(1, 0, 1.0)], Counting())
    assert found.by_task == {0: 0.5, 1: 1.0}
    assert found.reward.mean == 0.75
    assert found.pass_at == {1: 0.75, 2: 1.0}  # of task 1 there is but one sample: it has no pass@2
    assert found.pass_all == {1: 0.75, 2: 0.0}


def test_crashes_count_and_what_the_machinery_did_is_left_out():
    drawn = [sample(0, 0, 1.0), sample(0, 1, None, "crashed"), sample(1, 0, None, "failed"), sample(1, 1, -0.5)]
    lowest = summarise(drawn, Counting())
    assert (lowest.by_task, lowest.failed_reward) == ({0: 0.25, 1: -0.5}, -0.5)
    assert (lowest.crashed, lowest.left_out, lowest.counted) == (1, 1, 3)
    excluded = summarise(drawn, Counting(failed="exclude"))
    assert (excluded.by_task, excluded.crashed, excluded.left_out) == ({0: 1.0, 1: -0.5}, 1, 1)
    assert summarise(drawn, Counting(failed=0.25)).by_task[0] == 0.625


@pytest.mark.parametrize(("failed", "counts_as"), [("lowest", -1.0), ("exclude", None), (-0.5, -0.5)])
def test_a_crash_counts_alike_in_all_that_is_compared(failed, counts_as):
    sides = [[sample(0, 0, None, "crashed"), sample(1, 0, value)] for value in (-1.0, 1.0)]
    found = summarise_each(sides, Counting(failed=failed))
    assert [side.failed_reward for side in found] == [counts_as, counts_as]
    assert [side.by_task.get(0) for side in found] == [counts_as, counts_as]


def test_a_crash_is_no_better_than_what_the_agent_that_did_worst_earned():
    """Training counts it so, too; the total of a game is 0, whoever loses it."""
    lost = {"rewards": {"white": -1.0, "black": 1.0}}
    sides = [[sample(task, 0, 0.0, **lost) for task in range(4)], [sample(0, 0, None, "crashed")]]
    loses, crashes = summarise_each(sides, Counting(agents=("white",)))
    assert (loses.reward.mean, crashes.reward.mean, crashes.failed_reward) == (-1.0, -1.0, -1.0)
    shared = sample(0, 0, -1.5, shared=-2.0, rewards={"white": 0.5, "black": 0.5})
    assert summarise([shared, sample(1, 0, None, "crashed")], Counting()).failed_reward == -1.5
    shared = sample(0, 0, -2.0, shared=-2.0, **lost)
    assert summarise([shared, sample(1, 0, None, "crashed")], Counting()).failed_reward == -3.0


def test_an_agent_that_crashes_the_program_earns_what_a_crash_counts_as():
    spoke = {"usage": {"writer": Usage(calls=1)}}
    drawn = [sample(0, 0, 1.0, rewards={"writer": 1.0}, **spoke), sample(0, 1, None, "crashed", **spoke)]
    assert summarise(drawn, Counting()).by_agent["writer"].reward.mean == 0.5


def test_without_rewards_by_agent_an_agent_has_those_of_the_samples_in_which_it_spoke():
    both = {"usage": {"writer": Usage(calls=1), "checker": Usage(calls=2, tool_errors=1)}}
    drawn = [sample(0, 0, 1.0, **both), sample(1, 0, 0.0, usage={"writer": Usage(calls=1)})]
    agents = summarise(drawn, Counting()).by_agent
    assert (agents["writer"].reward.mean, agents["checker"].reward.mean) == (0.5, 1.0)
    assert (agents["checker"].usage.calls, agents["checker"].usage.tool_errors) == (2, 1)


def test_where_rewards_are_by_agent_one_whom_none_names_earned_nothing_that_is_known():
    both = {"usage": {"writer": Usage(calls=1), "checker": Usage(calls=2)}}
    drawn = [sample(0, 0, 1.0, rewards={"writer": 1.0}, **both), sample(1, 0, None, "crashed", **both)]
    agents = summarise(drawn, Counting()).by_agent
    assert (agents["writer"].reward.mean, agents["checker"].reward.mean) == (0.5, None)
    assert agents["checker"].usage.calls == 4


def test_a_crash_is_no_success_whatever_it_earns() -> None:
    found = summarise([sample(0, 0, 0.0), sample(0, 1, None, "crashed")], Counting(success=0.0))
    assert (found.pass_at, found.pass_all) == ({1: 0.5, 2: 1.0}, {1: 0.5, 2: 0.0})


def test_equal_lines_of_the_file_are_one_task_as_in_validations() -> None:
    tasks = [{"question": "easy"}] * 9 + [{"question": "hard"}] * 3
    drawn = [sample(place, 0, float(task["question"] == "easy")) for place, task in enumerate(tasks)]
    found = summarise(join_equal_tasks(drawn, tasks), Counting())
    rollouts = [
        Rollout(rollout_id=f"{place}", group_id=f"{place}", task=task, mode="val") for place, task in enumerate(tasks)
    ]
    attempts = [
        AttemptRecord(attempt_id=each.rollout_id, rollout=each, number=1, fence=1, worker="w", status="succeeded")
        for each in rollouts
    ]
    outcomes = [
        Outcome(rollout=its.rollout, attempt=its, attempts=(its,), rewards=(reward_of_run(its, each.reward),))
        for its, each in zip(attempts, drawn, strict=True)
    ]
    validation = score(outcomes, "lowest")
    assert (found.tasks, found.reward.mean) == (validation.tasks, validation.reward) == (2, 0.5)
    assert (found.reward.low, found.reward.high) == (validation.low, validation.high)


def reward_of_run(its: AttemptRecord, value: float | None) -> Reward:
    return Reward(rollout_id=its.attempt_id, attempt_id=its.attempt_id, value=value or 0.0, source="run")


def test_a_difference_is_taken_task_by_task():
    # Rewards differ much between tasks, and little, always in the same direction, between the two.
    this = summarise([sample(task, 0, task + 0.1) for task in range(20)], Counting())
    other = summarise([sample(task, 0, float(task)) for task in range(19)], Counting())
    found, tasks = difference(this, other)
    assert tasks == 19
    assert found.mean == pytest.approx(0.1)
    assert -2 < found.low < found.high < 2  # unpaired it would be from -3 to 3


def test_an_untrained_agent_that_fails_is_no_part_of_the_headline():
    def drawn(*routed: float) -> list[Sample]:
        return [
            sample(task, 0, value / 2, rewards={"router": value, "worker": 0.0}, usage={"worker": Usage(calls=1)})
            for task, value in enumerate(routed)
        ]

    counting = Counting(agents=("router",))
    this, other = summarise(drawn(1.0, 1.0, 1.0, 0.0), counting), summarise(drawn(1.0, 0.0, 0.0, 0.0), counting)
    assert (this.reward.mean, this.pass_at[1]) == (0.75, 0.75)
    assert this.reward == this.by_agent["router"].reward
    assert difference(this, other)[0].mean == 0.5
    found = differences_by_agent(this, other)
    assert {name: each.mean for name, (each, _) in found.items()} == {"router": 0.5, "worker": 0.0}
    assert summarise([*drawn(1.0), sample(1, 0, 0.0, rewards={"worker": 0.0})], counting).tasks == 1


def test_the_most_frequent_short_answer_of_each_agent_is_told_with_its_share():
    spoke = {"usage": {"router": Usage(calls=1), "writer": Usage(calls=1)}}
    drawn = [sample(n, 0, 1.0, answers={"router": {"technical": 1}, "writer": {}}, **spoke) for n in range(39)]
    found = summarise([*drawn, sample(39, 0, 0.0, answers={"router": {"sales": 1}}, **spoke)], Counting())
    assert found.to_json()["most_frequent"] == {"router": ["technical", 0.975]}


@given(st.permutations(range(6)))
def test_the_order_of_the_samples_does_not_matter(order):
    drawn = [sample(n // 2, n % 2, float(n)) for n in range(6)]
    assert summarise([drawn[n] for n in order], Counting()) == summarise(drawn, Counting())
