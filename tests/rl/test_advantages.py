"""Advantages: parity with the published formulas, and what holds for any rewards."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lightning_trainer.rl.advantages import (
    generalised_advantages,
    group_advantages,
    keep_values,
    leave_one_out,
    transition_advantages,
    whiten,
)

rewards = st.floats(-100, 100).map(lambda value: round(value, 3))
groups_of_returns = st.lists(st.lists(rewards, min_size=1, max_size=6), min_size=1, max_size=4)


def flat(groups):
    return [r for returns in groups for r in returns], [g for g, returns in enumerate(groups) for _ in returns]


@given(groups_of_returns)
def test_group_advantages_are_those_of_the_grpo_paper(groups):
    returns, ids = flat(groups)
    expected = []
    for members in groups:  # written from the paper, with the standard library's own mean and sample deviation
        for r in members:
            if len(members) == 1 or len(set(members)) == 1:
                expected.append(0.0)
            else:
                expected.append((r - statistics.fmean(members)) / (statistics.stdev(members) + 1e-4))
    assert group_advantages(returns, ids) == pytest.approx(expected, abs=1e-9)


@given(groups_of_returns)
def test_without_the_deviation_they_are_those_of_dr_grpo(groups):
    returns, ids = flat(groups)
    expected = [r - statistics.fmean(members) for members in groups for r in members]
    assert group_advantages(returns, ids, normalise=False) == pytest.approx(expected, abs=1e-9)


@given(groups_of_returns, st.booleans())
def test_advantages_sum_to_zero_in_each_group(groups, normalise):
    returns, ids = flat(groups)
    sums = np.bincount(ids, group_advantages(returns, ids, normalise=normalise))
    assert sums == pytest.approx(np.zeros(len(groups)), abs=1e-6)


@given(groups_of_returns, st.randoms())
def test_advantages_do_not_depend_on_the_order_of_attempts(groups, random_numbers):
    returns, ids = (np.array(part) for part in flat(groups))
    order = list(range(len(returns)))
    random_numbers.shuffle(order)
    shuffled = group_advantages(returns[order], ids[order])
    assert shuffled == pytest.approx(group_advantages(returns, ids)[order], abs=1e-9)


@given(st.lists(rewards, min_size=2, max_size=6), st.floats(0.5, 4), rewards)
def test_normalised_advantages_do_not_depend_on_the_scale_and_origin_of_rewards(returns, scale, origin):
    assume(statistics.stdev(returns) > 0.01)
    group = [0] * len(returns)
    moved = group_advantages([scale * r + origin for r in returns], group, eps=0.0)
    assert moved == pytest.approx(group_advantages(returns, group, eps=0.0), abs=1e-6)


@pytest.mark.parametrize("returns", [[0.1] * 3, [5.0], [1e-300] * 7, [0.7] * 8])
def test_a_group_without_contrast_teaches_exactly_nothing(returns):
    assert group_advantages(returns, ["task"] * len(returns)).tolist() == [0.0] * len(returns)


def test_groups_may_be_named():
    assert group_advantages([1, 0, 3, 1], ["b", "b", "a", "a"], normalise=False).tolist() == [0.5, -0.5, 1.0, -1.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_is_refused(bad):
    with pytest.raises(ValueError, match=f"value {bad} at 1"):
        group_advantages([1.0, bad], [0, 0])


def test_lengths_must_agree():
    with pytest.raises(ValueError, match="one length"):
        group_advantages([1.0, 2.0], [0])
    with pytest.raises(ValueError, match="one length"):
        transition_advantages([1.0, 2.0], [0, 1], [0, 0], agent_M=["a"])


def test_an_attempt_belongs_to_one_group():
    with pytest.raises(ValueError, match="two groups"):
        transition_advantages([1.0, 2.0], ["x", "x"], [0, 1])


def test_nothing_gives_nothing():
    assert group_advantages([], []).tolist() == []


attempts_with_calls = st.lists(
    st.tuples(st.integers(0, 2), rewards, st.integers(1, 5)),  # group, return, number of calls
    min_size=1,
    max_size=8,
)


@given(attempts_with_calls, st.booleans())
def test_identical_credit_gives_each_call_the_advantage_of_its_attempt(attempts, normalise):
    groups, returns, calls = (list(column) for column in zip(*attempts, strict=True))
    of_attempts = group_advantages(returns, groups, normalise=normalise)
    attempt_M = np.repeat(np.arange(len(attempts)), calls)
    of_calls = transition_advantages(
        np.repeat(returns, calls), attempt_M, np.repeat(groups, calls), normalise=normalise
    )
    assert of_calls == pytest.approx(of_attempts[attempt_M], abs=1e-9)


def test_a_talkative_attempt_weighs_no_more_than_a_brief_one():
    # Attempt 0 called once and got 1, attempt 1 called nine times and got 0: the baseline is 0.5, not 0.1.
    advantages = transition_advantages([1.0] + [0.0] * 9, [0] + [1] * 9, [0] * 10, normalise=False)
    assert advantages.tolist() == [0.5] + [-0.5] * 9


step_values = st.lists(
    st.tuples(st.integers(0, 5), st.sampled_from("xy"), rewards), min_size=1, max_size=20
)  # attempt, agent, value; attempts 0-2 are group 0, 3-5 group 1


@given(step_values, st.booleans(), st.booleans())
def test_mean_advantages_of_attempts_sum_to_zero(steps, normalise, by_agent):
    attempts, agents, values = (np.array(column) for column in zip(*steps, strict=True))
    groups = attempts // 3
    advantages = transition_advantages(
        values, attempts, groups, agent_M=agents if by_agent else None, normalise=normalise
    )
    units = {(g, a if by_agent else "") for g, a in zip(groups, agents, strict=True)}
    for group, agent in units:
        inside = (groups == group) & ((agents == agent) | (not by_agent))
        means = [advantages[inside & (attempts == a)].mean() for a in np.unique(attempts[inside])]
        assert sum(means) == pytest.approx(0.0, abs=1e-6)


@given(step_values)
def test_step_rewards_never_explode(steps):
    attempts, _, values = (np.array(column) for column in zip(*steps, strict=True))
    advantages = transition_advantages(values, attempts, attempts // 3)
    # Each squared distance is at most the number of calls of the group times its variance.
    assert np.abs(advantages).max() <= math.sqrt(3 * len(values)) + 1e-9


def test_equal_attempts_with_different_steps_still_compare_their_steps():
    # Both attempts mean 0.5: by the deviation of the means alone, 0.5 would be divided by 0.0001.
    advantages = transition_advantages([1.0, 0.0, 1.0, 0.0], [0, 0, 1, 1], [0] * 4)
    assert advantages == pytest.approx([0.7069, -0.7069, 0.7069, -0.7069], abs=1e-3)


def test_each_agent_is_compared_with_itself_over_the_attempts_in_which_it_spoke():
    # The answerer spoke in two of three attempts only.
    values = [1.0, 1.0, 0.0, 0.0, 0.0]
    attempts = [0, 0, 1, 1, 2]
    agents = ["caller", "answerer", "caller", "answerer", "caller"]
    advantages = transition_advantages(values, attempts, ["t"] * 5, agent_M=agents, normalise=False)
    assert advantages == pytest.approx([2 / 3, 0.5, -1 / 3, -0.5, -1 / 3])


def test_an_agent_that_spoke_in_one_attempt_of_its_group_has_nothing_to_compare():
    advantages = transition_advantages([1.0, 0.0, 1.0], [0, 1, 0], [0, 0, 0], agent_M=["x", "x", "y"])
    assert advantages[2] == 0.0
    assert advantages[0] > 0


def test_the_steps_of_a_lone_attempt_have_nothing_to_compare():
    assert transition_advantages([1.0, 0.0], [0, 0], [0, 0]).tolist() == [0.0, 0.0]


@given(groups_of_returns)
def test_leave_one_out_compares_with_the_mean_of_the_others(groups):
    returns, ids = flat(groups)
    expected = []
    for members in groups:
        for place, r in enumerate(members):
            others = members[:place] + members[place + 1 :]
            equal = len(set(members)) == 1
            expected.append(0.0 if not others or equal else r - statistics.fmean(others))
    assert leave_one_out(returns, range(len(returns)), ids) == pytest.approx(expected, abs=1e-9)


@given(attempts_with_calls)
def test_leave_one_out_counts_an_attempt_once_however_often_it_called(attempts):
    groups, returns, calls = (list(column) for column in zip(*attempts, strict=True))
    of_attempts = leave_one_out(returns, range(len(returns)), groups)
    attempt_M = np.repeat(np.arange(len(attempts)), calls)
    of_calls = leave_one_out(np.repeat(returns, calls), attempt_M, np.repeat(groups, calls))
    assert of_calls == pytest.approx(of_attempts[attempt_M], abs=1e-9)


def test_leave_one_out_compares_each_agent_with_itself():
    values, attempts, agents = [1.0, 5.0, 0.0, 3.0, 0.5], [0, 0, 1, 1, 2], ["x", "y", "x", "y", "x"]
    found = leave_one_out(values, attempts, [0] * 5, agent_M=agents)
    assert found == pytest.approx([0.75, 2.0, -0.75, -2.0, 0.0])


weighted = st.lists(st.tuples(rewards, st.integers(0, 5), st.sampled_from("xy")), max_size=12)


@given(weighted)
def test_whitened_values_have_mean_0_and_variance_1_for_each_agent(entries):
    values, weights, agents = (list(column) for column in zip(*entries, strict=True)) if entries else ([], [], [])
    found = whiten(values, weights, agent_M=agents)
    for agent in set(agents):
        inside = [(f, v, w) for f, v, w, a in zip(found, values, weights, agents, strict=True) if a == agent]
        total = sum(w for _, _, w in inside)
        assert sum(f * w for f, _, w in inside) == pytest.approx(0.0, abs=1e-5)
        repeated = [v for _, v, w in inside for _ in range(w)]
        if len(set(repeated)) > 1 and statistics.stdev(repeated) > 0.01:
            assert sum(w * f * f for f, _, w in inside) / (total - 1) == pytest.approx(1.0, rel=1e-3)
        else:
            assert all(f == 0.0 for f, _, w in inside if w) or statistics.stdev(repeated) > 0


@pytest.mark.parametrize("values", [[], [0.1] * 3, [5.0], [0.7] * 8])
def test_whitening_without_contrast_gives_exactly_nothing(values):
    assert whiten(values).tolist() == [0.0] * len(values)


def test_whitening_refuses_what_it_can_not_count():
    for values, weights in (([1.0], [1.0, 2.0]), ([math.nan], [1.0]), ([1.0], [-1.0])):
        with pytest.raises(ValueError, match=r"differ in length|must be finite"):
            whiten(values, weights)


def test_uncompared_values_stay_as_they_are():
    assert keep_values([1.0, 2.0], [0, 1], [0, 0], agent_M=["x", "y"]).tolist() == [1.0, 2.0]


random_rows = st.tuples(st.integers(0, 4), st.integers(0, 7), st.integers(0, 999))


@given(random_rows, st.floats(0, 1), st.floats(0, 1))
def test_generalised_advantages_are_sums_of_discounted_errors(shape, gamma, lam):
    rows, tokens, seed = shape
    random = np.random.default_rng(seed)
    reward, value = random.normal(size=(2, rows, tokens))
    mask = random.random((rows, tokens)) < 0.6
    found, targets = generalised_advantages(reward, value, mask, gamma=gamma, lam=lam)
    for row in range(rows):
        places = np.flatnonzero(mask[row])
        for n, t in enumerate(places):  # equation 16: sum of (gamma lam)**l delta_t+l, over sampled tokens only
            expected = 0.0
            for step, k in enumerate(places[n:]):
                after = places[n + step + 1] if n + step + 1 < len(places) else None
                delta = reward[row, k] + gamma * (0.0 if after is None else value[row, after]) - value[row, k]
                expected += (gamma * lam) ** step * delta
            assert found[row, t] == pytest.approx(expected, abs=1e-9)
            assert targets[row, t] == pytest.approx(expected + value[row, t], abs=1e-9)
    assert not found[~mask].any()
    assert not targets[~mask].any()


def test_with_lambda_1_the_advantage_is_the_return_without_the_value():
    reward, value = np.array([[0.0, 0.0, 1.0]]), np.array([[0.2, 0.9, 0.4]])
    found, targets = generalised_advantages(reward, value, np.array([[True, False, True]]))
    assert found.tolist() == [[pytest.approx(0.8), 0.0, pytest.approx(0.6)]]
    assert targets.tolist() == [[pytest.approx(1.0), 0.0, pytest.approx(1.0)]]


def test_shapes_must_agree():
    with pytest.raises(ValueError, match="shape"):
        generalised_advantages(np.zeros((1, 2)), np.zeros((1, 3)), np.ones((1, 2)))


@pytest.mark.parametrize("size", [1e120, 1e155, 1e200, 1e300])
def test_rewards_of_any_size_are_compared(size):
    assert group_advantages([size, 0.0], ["a", "a"]) == pytest.approx([math.sqrt(0.5), -math.sqrt(0.5)])
    assert group_advantages([size, 0.0], ["a", "a"], normalise=False) == pytest.approx([size / 2, -size / 2])
    assert whiten([size, 0.0]) == pytest.approx([math.sqrt(0.5), -math.sqrt(0.5)])


def test_large_rewards_of_one_group_change_no_other():
    plain = group_advantages([0.3, 0.1, 0.7], ["b"] * 3)
    assert group_advantages([1e200, 0.0, 0.3, 0.1, 0.7], ["a", "a", "b", "b", "b"])[2:].tolist() == plain.tolist()


def test_exact_zeros_stay_zeros_when_the_batch_is_whitened():
    """A flat group beside others whose centred values round: its rows must not be forwarded for 4e-17."""
    returns = [0.1, 0.7, 0.30000000000000004, 1.0, 1.0, 1.0, 0.2, 0.9, 0.35]
    groups = ["a"] * 3 + ["flat"] * 3 + ["b"] * 3
    centred = group_advantages(returns, groups, normalise=False)
    assert sum(centred) != 0.0, "or this tests nothing"
    assert whiten(centred)[3:6].tolist() == [0.0, 0.0, 0.0]
    assert whiten(centred) == pytest.approx(centred / np.std(centred, ddof=1))
