"""Rows on their way through verl: what goes in comes out, and every rollout counts once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_trainer.backends.verl.encoding import decode, encode, prompt_length, rewards_to_come, spans_of
from lightning_trainer.backends.verl.steps.agreement import WeightsError, agreement
from lightning_trainer.rl.advantages import keep_values, leave_one_out, transition_advantages
from lightning_trainer.rl.rows import Row, token_weights

torch = pytest.importorskip("torch")

from lightning_trainer.backends.verl.estimators import estimate


def row(*calls: tuple[int, int, float], agent: str = "a", attempt: str = "t") -> Row:
    """A row of calls: tokens before each, tokens sampled, advantage of each."""
    mask, advantages = [], []
    for before, sampled, advantage in calls:
        mask += [False] * before + [True] * sampled
        advantages += [0.0] * before + [advantage] * sampled
    return Row(
        tokens=np.arange(len(mask), dtype=np.int32),
        mask=np.array(mask),
        logprobs=np.zeros(len(mask), np.float32),
        advantages=np.array(advantages),
        lengths=tuple(sampled for _, sampled, _ in calls),
        agent=agent,
        attempt_id=attempt,
        rollout_id=attempt,
        group_id="g",
    )


calls = st.lists(
    st.tuples(st.integers(1, 4), st.integers(1, 5), st.floats(-3, 3, allow_nan=False, width=32)), min_size=1, max_size=4
)


def advantages_from(rows: list[Row], **options: object):
    """What verl's trainer would get for the responses of these rows, one tensor a row."""
    responses = [torch.tensor(r.mask[prompt_length(r) :]).long() for r in rows]
    longest = max(len(response) for response in responses)
    mask = torch.stack([torch.nn.functional.pad(response, (0, longest - len(response))) for response in responses])
    uids = [encode(spans_of(r)) for r in rows]
    out, _ = estimate(response_mask=mask, index=uids, **{"whiten": False, "aggregation": "token-mean", **options})
    return [out[i, : len(responses[i])].numpy() for i in range(len(rows))]


@given(st.lists(calls, min_size=1, max_size=4))
def test_advantages_come_out_as_they_went_in(made):
    rows = [row(*each) for each in made]
    for r, out in zip(rows, advantages_from(rows), strict=True):
        np.testing.assert_allclose(out, r.advantages[prompt_length(r) :], rtol=1e-6)


@pytest.mark.parametrize("aggregation", ["token-mean", "sequence-mean", "sequence-sum"])
@given(made=st.lists(calls, min_size=1, max_size=4))
def test_a_mean_over_tokens_of_weighed_advantages_is_the_aggregation_asked_for(aggregation, made):
    rows = [row(*each) for each in made]
    tokens = sum(int(r.mask.sum()) for r in rows)
    weights = token_weights(rows, aggregation)
    for r, out, weight in zip(rows, advantages_from(rows, aggregation=aggregation), weights, strict=True):
        sampled = r.mask[prompt_length(r) :]
        np.testing.assert_allclose(out[sampled] / tokens, r.advantages[r.mask] * weight, rtol=1e-4, atol=1e-6)


def test_whitened_values_have_mean_0_and_deviation_1_over_tokens():
    rows = [row((2, 3, 1.0)), row((1, 5, 3.0)), row((1, 2, -2.0), (2, 2, 0.5))]
    values = np.concatenate(
        [o[r.mask[prompt_length(r) :]] for r, o in zip(rows, advantages_from(rows, whiten=True), strict=True)]
    )
    assert values.mean() == pytest.approx(0, abs=1e-6)
    assert values.std() == pytest.approx(1, rel=1e-5)


def test_a_row_that_verl_added_to_fill_a_batch_has_no_advantage():
    mask = torch.zeros(1, 1, dtype=torch.long)
    out, _ = estimate(response_mask=mask, index=["pad0123"], whiten=False, aggregation="sequence-mean")
    assert out.tolist() == [[0.0]]
    assert decode("pad0123") == []


def test_tokens_that_verl_rejects_get_no_advantage():
    r = row((1, 3, 2.0))
    mask = torch.tensor([[1, 0, 1]])
    out, _ = estimate(response_mask=mask, index=[encode(spans_of(r))], whiten=False, aggregation="token-mean")
    assert out.tolist() == [[2.0, 0.0, 2.0]]


@given(calls)
def test_rewards_still_to_come_are_each_calls_own_value(made):
    r = row(*made)
    spans = spans_of(r)
    rewards = np.zeros(len(r.mask) - prompt_length(r))
    for place, value in rewards_to_come(spans):
        rewards[place] += value
    to_come = rewards[::-1].cumsum()[::-1]
    for start, length, value in spans:
        np.testing.assert_allclose(to_come[start : start + length], value, atol=1e-5)


def test_leave_one_out_compares_with_the_mean_of_the_others():
    values, attempts = [1.0, 4.0, 7.0], ["x", "y", "z"]
    out = leave_one_out(values, attempts, ["g"] * 3, agent_M=["a"] * 3)
    np.testing.assert_allclose(out, [1 - 5.5, 4 - 4.0, 7 - 2.5], atol=1e-12)


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(-5, 5, allow_nan=False)), min_size=1, max_size=12))
def test_leave_one_out_is_what_its_definition_says(made):
    attempts, values = [f"t{a}" for a, _ in made], [v for _, v in made]
    out = leave_one_out(values, attempts, ["g"] * len(made), agent_M=["a"] * len(made))
    means = {a: np.mean([v for b, v in zip(attempts, values, strict=True) if b == a]) for a in set(attempts)}
    for attempt, value, found in zip(attempts, values, out, strict=True):
        others = [mean for a, mean in means.items() if a != attempt]
        # Where there is nothing to compare, the shared formula gives exactly 0.
        expected = value - np.mean(others) if others and len(set(values)) > 1 else 0.0
        assert found == pytest.approx(expected, abs=1e-9)


def test_two_calls_of_one_attempt_count_once():
    out = leave_one_out([0.0, 0.0, 1.0], ["x", "x", "y"], ["g"] * 3, agent_M=["a"] * 3)
    np.testing.assert_allclose(out, [-1.0, -1.0, 1.0])
    same = transition_advantages([0.0, 0.0, 1.0], ["x", "x", "y"], ["g"] * 3, agent_M=["a"] * 3, normalise=False)
    np.testing.assert_allclose(out, same * 2)  # n / (n - 1) for two attempts


def test_values_may_stay_as_they_are():
    assert keep_values([1.0, 2.0], ["x", "y"], ["g", "g"], agent_M=["a", "a"], eps=1.0).tolist() == [1.0, 2.0]


def test_equal_weights_agree_and_others_stop_the_run():
    rng = np.random.default_rng(0)
    trainer = -rng.exponential(size=500)
    same = agreement(trainer + rng.normal(0, 1e-3, 500), trainer)
    same.check()
    assert same.correlation > 0.999
    wrong = agreement(trainer[::-1].copy(), trainer)
    with pytest.raises(WeightsError, match="does not sample from the weights"):
        wrong.check()


def test_a_sure_policy_with_rounding_noise_is_no_reason_to_stop():
    rng = np.random.default_rng(0)
    agreement(-np.abs(rng.normal(0, 1e-4, 100)), -np.abs(rng.normal(0, 1e-4, 100))).check()
    agreement(np.zeros(0), np.zeros(0)).check()
    with pytest.raises(WeightsError):
        agreement(np.full(10, -1.0), np.full(10, -2.0)).check()
