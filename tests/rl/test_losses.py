"""Losses: parity with the published formulas, and gradients that neither masks, merging nor micro-batches change."""

from __future__ import annotations

import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_spans.schema.transitions import Tokens, Transition
from lightning_trainer.rl.losses import (
    cispo_loss,
    entropy,
    gspo_loss,
    importance_weights,
    kl_divergence,
    policy_loss,
    second_moment_mask,
    token_logprobs,
    value_loss,
)
from lightning_trainer.rl.rows import make_rows, token_weights

pytestmark = pytest.mark.torch
AGGREGATIONS = ["token-mean", "sequence-mean", "sequence-sum"]

tokens = st.lists(
    st.tuples(st.floats(-9, -0.01), st.floats(-9, -0.01), st.floats(-3, 3), st.floats(0.01, 1)), min_size=1, max_size=8
)


def columns(rows):
    return [torch.tensor(column, dtype=torch.float32) for column in zip(*rows, strict=True)]


@given(tokens)
@settings(deadline=None)
def test_the_policy_loss_is_that_of_ppo_and_dapo(rows):
    new, old, advantages, weights = columns(rows)
    expected = 0.0
    for n, o, a, w in zip(new.tolist(), old.tolist(), advantages.tolist(), weights.tolist(), strict=True):
        ratio = math.exp(n - o)  # arXiv 2503.14476, equation 10, term by term
        expected -= w * min(ratio * a, min(max(ratio, 0.8), 1.28) * a)
    loss = policy_loss(new, old, advantages, weights, clip_low=0.2, clip_high=0.28).loss
    assert loss.item() == pytest.approx(expected, rel=1e-4, abs=1e-5)


def gradient(new, old, advantage, **options):
    logprob = torch.tensor([new], requires_grad=True)
    result = policy_loss(logprob, torch.tensor([old]), torch.tensor([advantage]), torch.ones(1), **options)
    result.loss.backward()
    return logprob.grad.item(), bool(result.clipped[0])


@pytest.mark.parametrize(
    ("ratio", "advantage", "clipped"),
    [
        (1.0, 1.0, False),
        (1.25, 1.0, False),  # between the low and the high clip: clip-higher lets it grow
        (1.3, 1.0, True),
        (0.7, 1.0, False),  # below, but to be made more likely
        (0.7, -1.0, True),
        (0.81, -1.0, False),
        (1.3, -1.0, False),
    ],
)
def test_a_token_outside_the_clip_has_no_gradient_and_is_told(ratio, advantage, clipped):
    slope, said = gradient(math.log(ratio) - 1.0, -1.0, advantage, clip_low=0.2, clip_high=0.28)
    assert said is clipped
    assert slope == pytest.approx(0.0 if clipped else -ratio * advantage, rel=1e-5)


def test_the_dual_clip_bounds_what_a_bad_token_can_weigh():
    slope, clipped = gradient(-1.0, -5.0, -1.0)
    assert (slope, clipped) == (pytest.approx(math.exp(4.0), rel=1e-4), False)
    slope, clipped = gradient(-1.0, -5.0, -1.0, clip_dual=3.0)
    assert (slope, clipped) == (0.0, True)


def test_on_policy_the_gradient_is_that_of_reinforce():
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    policy_loss(logprobs, logprobs.detach(), torch.tensor([0.5, -1.5]), torch.tensor([0.5, 0.5])).loss.backward()
    assert logprobs.grad.tolist() == pytest.approx([-0.25, 0.75])


def test_a_ratio_beyond_float_range_stays_finite():
    slope, _ = gradient(-0.1, -900.0, -1.0)
    assert math.isfinite(slope)


def test_low_precision_inputs_are_computed_in_float32():
    low = torch.full((3,), -1.0, dtype=torch.bfloat16)
    assert policy_loss(low, low, low, low).loss.dtype == torch.float32
    assert kl_divergence(low, low).dtype == torch.float32
    assert token_logprobs(torch.zeros(3, 4, dtype=torch.bfloat16), torch.zeros(3)).dtype == torch.float32


@given(st.floats(-9, 0), st.floats(-9, 0))
def test_the_kl_estimators_are_schulmans(policy, reference):
    d = policy - reference
    expected = {"k1": d, "k2": d * d / 2, "k3": min(math.exp(-d) - 1 + d, 10.0), "abs": abs(d)}
    expected |= {"kl": d, "mse": d * d / 2, "low_var_kl": expected["k3"], "low_var": expected["k3"]}
    for estimator, value in expected.items():
        got = kl_divergence(torch.tensor([policy]), torch.tensor([reference]), estimator).item()
        assert got == pytest.approx(value, rel=1e-3, abs=1e-4)


def test_k1_and_k3_estimate_the_divergence_and_k2_and_k3_are_never_negative():
    generator = torch.Generator().manual_seed(0)  # near each other: k3 is held below 10 nats
    policy = torch.log_softmax(torch.randn(5, generator=generator) / 2, -1)
    reference = torch.log_softmax(torch.randn(5, generator=generator) / 2, -1)
    exact = (policy.exp() * (policy - reference)).sum()
    for estimator in ("k1", "k3"):  # unbiased: the expectation over all tokens is the divergence itself
        expectation = (policy.exp() * kl_divergence(policy, reference, estimator)).sum()
        assert expectation.item() == pytest.approx(exact.item(), rel=1e-5)
    for estimator in ("k2", "k3"):
        assert (kl_divergence(policy, reference, estimator) >= 0).all()


@pytest.mark.parametrize("estimator", ["k1+", "k3+", "abs+", "low_var+"])
def test_a_plus_takes_the_gradient_of_k2_and_keeps_the_value(estimator):
    policy, reference = torch.tensor([-1.0, -2.0], requires_grad=True), torch.tensor([-1.5, -0.5])
    value = kl_divergence(policy, reference, estimator)
    torch.testing.assert_close(value, kl_divergence(policy, reference, estimator[:-1]))
    value.sum().backward()
    assert policy.grad.tolist() == pytest.approx([0.5, -1.5])


def test_the_gradient_of_k2_is_that_of_the_divergence_and_that_of_k1_is_0_in_the_mean():
    generator = torch.Generator().manual_seed(3)
    logits, reference = (torch.randn(6, generator=generator) for _ in range(2))
    reference = reference.log_softmax(-1)

    def mean_gradient(estimator):
        found = logits.clone().requires_grad_()
        logprobs = found.log_softmax(-1)
        (logprobs.detach().exp() * kl_divergence(logprobs, reference, estimator)).sum().backward()
        return found.grad

    exact = logits.clone().requires_grad_()
    logprobs = exact.log_softmax(-1)
    (logprobs.exp() * (logprobs - reference)).sum().backward()
    torch.testing.assert_close(mean_gradient("k2"), exact.grad)
    torch.testing.assert_close(mean_gradient("k3+"), exact.grad)
    assert mean_gradient("k1").abs().max() < 1e-6


sequences = st.lists(st.integers(0, 2), min_size=1, max_size=9)


@given(sequences, st.integers(0, 99))
@settings(deadline=None)
def test_gspo_clips_responses_and_not_tokens(members, seed):
    random = np.random.default_rng(seed)
    new, old, advantages = (random.normal(size=len(members)) for _ in range(3))
    now = torch.tensor(new, dtype=torch.float32, requires_grad=True)
    tensors = [torch.tensor(x, dtype=torch.float32) for x in (old, advantages, np.ones(len(members)))]
    result = gspo_loss(now, *tensors, torch.tensor(members), clip_low=0.3, clip_high=0.4)
    result.loss.backward()
    for t, member in enumerate(members):  # arXiv 2507.18071: one ratio for all tokens of a response
        own = [k for k, other in enumerate(members) if other == member]
        ratio = math.exp(sum(new[k] - old[k] for k in own) / len(own))
        assert result.ratios[t].item() == pytest.approx(ratio, rel=1e-4)
        held = -min(max(ratio, 0.7), 1.4) * advantages[t] > -ratio * advantages[t]
        if abs(ratio - 0.7) > 1e-5 and abs(ratio - 1.4) > 1e-5:
            assert result.clipped[t].item() is bool(held)
            assert now.grad[t].item() == pytest.approx(0.0 if held else -ratio * advantages[t], rel=1e-3, abs=1e-6)


def test_gspo_without_a_token_is_0():
    none = torch.zeros(0)
    assert gspo_loss(none, none, none, none, none).loss.item() == 0.0


def test_cispo_keeps_the_gradient_of_clipped_tokens():
    now = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    old = torch.tensor([-1.0, -3.0, 2.0])  # ratios 1, 7.4 and 0.05
    result = cispo_loss(now, old, torch.tensor([1.0, 1.0, -1.0]), torch.ones(3), clip_low=0.5, clip_high=0.28)
    result.loss.backward()
    assert now.grad.tolist() == pytest.approx([-1.0, -1.28, 0.5])
    assert result.clipped.tolist() == [False, True, True]
    free = cispo_loss(now, old, torch.tensor([1.0, 1.0, -1.0]), torch.ones(3), clip_low=1.0, clip_high=0.28)
    assert free.clipped.tolist() == [False, True, False]


def test_the_value_loss_never_hides_an_error_by_clipping():
    now = torch.tensor([0.0, 1.0, 3.0], requires_grad=True)
    old, returns = torch.zeros(3), torch.tensor([1.0, 1.0, 1.0])
    plain = value_loss(now, old, returns, torch.ones(3))
    assert plain.item() == pytest.approx(0.5 * (1 + 0 + 4))
    clipped = value_loss(now, old, returns, torch.ones(3), clip=0.5)
    assert clipped.item() == pytest.approx(0.5 * (1 + 0.25 + 4))


def test_an_unknown_estimator_is_an_error():
    with pytest.raises(ValueError, match="Use k1, k2, k3 or abs"):
        kl_divergence(torch.zeros(1), torch.zeros(1), "k4")


def test_log_probabilities_and_entropy_are_those_of_the_tempered_distribution():
    generator = torch.Generator().manual_seed(1)
    logits, ids = torch.randn(6, 7, generator=generator), torch.tensor([0, 1, 2, 3, 4, 6])
    for temperature in (1.0, 0.5, torch.full((6,), 0.5)):
        divisor = 1.0 if isinstance(temperature, float) and temperature == 1.0 else 0.5
        distribution = torch.distributions.Categorical(logits=logits / divisor)
        torch.testing.assert_close(token_logprobs(logits, ids, temperature), distribution.log_prob(ids))
        torch.testing.assert_close(entropy(logits, temperature), distribution.entropy())


class Causal(torch.nn.Module):
    """A tiny causal model: the logits at t depend on every token up to t and on its place."""

    def __init__(self, vocabulary=6, width=8):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(vocabulary, width)
        self.cell = torch.nn.GRU(width, width, batch_first=True)
        self.head = torch.nn.Linear(width, vocabulary)

    def forward(self, ids):
        return self.head(self.cell(self.embedding(ids[None]))[0][0])


def gradients(rows, aggregation, *, micro_batch, skip_without_gradient=False):
    """What a backend does: logits at the trained tokens of each row, weights made from the whole batch."""
    model = Causal()
    weights = token_weights(rows, aggregation)
    for start in range(0, len(rows), micro_batch):
        loss = torch.zeros(())
        chosen = zip(rows[start : start + micro_batch], weights[start : start + micro_batch], strict=True)
        for row, row_weights in chosen:
            if skip_without_gradient and not row.has_gradient:
                continue
            ids, places = torch.tensor(row.tokens, dtype=torch.long), torch.tensor(np.flatnonzero(row.mask))
            logprobs = token_logprobs(model(ids)[places - 1], ids[places], row.temperature)
            old, advantages = torch.tensor(row.logprobs)[places], torch.tensor(row.advantages)[places]
            loss = loss + policy_loss(logprobs, old, advantages, torch.tensor(row_weights)).loss
        if loss.requires_grad:
            loss.backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def batch(**options):
    """Two interleaved agents in three attempts, answers of different lengths, one attempt without advantage."""
    random_numbers = np.random.default_rng(0)
    calls, advantages = [], []
    for attempt, advantage in (("a", 1.2), ("b", -0.7), ("c", 0.0)):
        history = {"x": [1], "y": [2]}
        for turn in range(6):
            agent = "xy"[turn % 2]
            response = random_numbers.integers(0, 6, size=1 + turn % 3).tolist()
            logprobs = tuple((-random_numbers.random(len(response)) - 1.2).tolist())
            calls.append(
                Transition(
                    rollout_id=attempt,
                    attempt_id=attempt,
                    agent=agent,
                    turn=turn,
                    span_id=str(turn),
                    tokens=Tokens(tuple(history[agent]), tuple(response), logprobs),
                )
            )
            advantages.append(advantage * 0.9**turn)
            history[agent] = [*history[agent], *response, 5]
    return make_rows(calls, np.array(advantages), dict.fromkeys("abc", "g"), **options)[0]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_merged_rows_give_the_gradient_of_unmerged_ones(aggregation):
    merged, unmerged = batch(), batch(merge=False)
    assert (len(merged), len(unmerged)) == (6, 18)
    expected = gradients(unmerged, aggregation, micro_batch=18)
    assert expected.abs().max() > 0.01
    torch.testing.assert_close(gradients(merged, aggregation, micro_batch=6), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("micro_batch", [1, 4, 5])
def test_micro_batches_do_not_change_the_gradient(aggregation, micro_batch):
    rows = batch()
    expected = gradients(rows, aggregation, micro_batch=len(rows))
    torch.testing.assert_close(gradients(rows, aggregation, micro_batch=micro_batch), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_rows_without_advantage_can_be_skipped_without_changing_the_gradient(aggregation):
    rows = batch()
    assert sum(not row.has_gradient for row in rows) == 2
    skipped = gradients(rows, aggregation, micro_batch=2, skip_without_gradient=True)
    torch.testing.assert_close(skipped, gradients(rows, aggregation, micro_batch=2), atol=1e-7, rtol=1e-6)


def test_tokens_that_were_not_sampled_get_no_gradient():
    row = batch()[0]
    model = Causal()
    ids, places = torch.tensor(row.tokens, dtype=torch.long), torch.tensor(np.flatnonzero(row.mask))
    logits = model(ids)
    logits.retain_grad()
    logprobs = token_logprobs(logits[places - 1], ids[places])
    advantages, old = torch.tensor(row.advantages)[places], logprobs.detach()
    policy_loss(logprobs, old, advantages, torch.ones(len(places))).loss.backward()
    reached = logits.grad.abs().sum(-1) > 0
    assert reached.tolist() == [*row.mask[1:].tolist(), False]


@given(
    ratios=st.lists(st.floats(-3.0, 3.0, width=32), min_size=1, max_size=40),
    bound=st.floats(0.001, 4.0),
)
def test_the_second_moment_mask_leaves_out_no_more_of_the_largest_than_it_must(ratios, bound):
    ratio_T = torch.tensor(ratios)
    kept_T = second_moment_mask(ratio_T, bound)
    squares_T = ratio_T.double().square()
    if kept_T.any():
        assert squares_T[kept_T].mean() <= bound
    if not kept_T.all():
        smallest = squares_T[~kept_T].min()
        assert not kept_T.any() or squares_T[kept_T].max() <= smallest
        assert (squares_T[kept_T].sum() + smallest) / (kept_T.sum() + 1) > bound


def test_tokens_weigh_their_ratio_where_only_the_second_moment_is_bounded():
    ratio_T = torch.tensor([0.1, -0.1, 2.0])
    weights_T = importance_weights(ratio_T, moment=0.04)
    assert weights_T.tolist() == pytest.approx([math.exp(0.1), math.exp(-0.1), 0.0])
    assert importance_weights(ratio_T, cap=2.0).tolist()[2] == pytest.approx(2.0)
    assert importance_weights(ratio_T).tolist() == [1.0, 1.0, 1.0]
