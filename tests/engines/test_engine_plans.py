"""How a GPU is divided between vLLM and the learner, and whether an engine has the weights that it should have."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_spans.errors import ConfigError
from lightning_trainer.backends.torch.footprint import learner_memory
from lightning_trainer.engines.vllm.constrained import mark_steered, marks
from lightning_trainer.engines.vllm.memory import ASLEEP, OVERHEAD, plan_memory
from lightning_trainer.gateway.engine import SampledPiece, Sampling
from lightning_trainer.gateway.upstream.served_names import ServedNames
from lightning_trainer.models.shape import Shape
from lightning_trainer.rl.delivery import correlation, delivery

GIB = 2**30
QWEN_7B = Shape(
    parameters=7_615_616_512,
    layers=28,
    hidden=3584,
    kv_width=512,
    inner=18_944,
    heads_width=3584,
    vocabulary=152_064,
    context=32_768,
    tied=False,
)


def test_a_plan_adds_up_and_leaves_the_learner_what_it_needs():
    learner = learner_memory(QWEN_7B, width=2, adapters=40_000_000, tokens=2048).peak
    plan = plan_memory(QWEN_7B, total=80 * GIB, width=2, slots=64, context=4096, adapters=160_000_000, learner=learner)
    assert plan.weights == 2 * (QWEN_7B.parameters + 160_000_000)
    assert plan.cache == plan.tokens * 2 * 28 * 512 * 2
    assert plan.learner + plan.weights + plan.cache + OVERHEAD <= 80 * GIB
    assert plan.share == pytest.approx((plan.weights + plan.cache + OVERHEAD) / (80 * GIB), abs=1e-3)
    assert "80.0 GiB" in plan.line


def test_the_cache_is_no_larger_than_all_answers_at_once():
    plan = plan_memory(QWEN_7B, total=140 * GIB, width=2, slots=4, context=1024)
    assert plan.tokens == 4 * 1024


def test_too_small_a_gpu_is_refused_with_what_is_missing():
    learner = learner_memory(QWEN_7B, width=2, adapters=40_000_000, tokens=2048).peak
    with pytest.raises(ConfigError, match=r"does not hold both vLLM and the learner: [\d.]+ GiB are missing"):
        plan_memory(QWEN_7B, total=24 * GIB, width=2, slots=64, context=4096, learner=learner)


@given(
    total=st.integers(20, 200),
    slots=st.integers(1, 512),
    context=st.integers(128, 32_768),
    idle=st.sampled_from([None, 2, 18]),
)
def test_no_plan_promises_more_than_there_is(total, slots, context, idle):
    """Of two sums, if vLLM sleeps: one while it samples, one while the learner learns."""
    most = 20 * GIB
    idle = None if idle is None else idle * GIB
    try:
        plan = plan_memory(QWEN_7B, total=total * GIB, width=2, slots=slots, context=context, learner=most, idle=idle)
    except ConfigError:
        return
    assert plan.tokens >= context
    assert plan.idle + plan.share * plan.total <= plan.total
    assert plan.learner + (ASLEEP if plan.sleeps else plan.served) <= plan.total
    assert ("sleeps" in plan.line) == plan.sleeps
    assert not (plan.sleeps and idle is None)


def test_vllm_sleeps_only_if_both_do_not_fit_side_by_side():
    known = {"total": 40 * GIB, "width": 2, "slots": 64, "context": 4096, "idle": 16 * GIB}
    assert plan_memory(QWEN_7B, learner=17 * GIB, **known).sleeps is False
    assert plan_memory(QWEN_7B, learner=30 * GIB, **known).sleeps is True
    with pytest.raises(ConfigError, match="GiB are missing"):
        plan_memory(QWEN_7B, learner=38 * GIB, **known)


@pytest.mark.parametrize("noise", [0.0, 1e-5, 0.01])
def test_an_update_that_reached_the_engine_is_told_from_one_that_did_not(noise):
    random = np.random.default_rng(0)
    before, after = (random.normal(-2.0, 1.0, 256) for _ in range(2))
    after = before + 0.02 * (after - before)
    rounding = random.normal(0.0, noise, 256)
    assert delivery(before, after, after + rounding).share == pytest.approx(1.0, abs=0.15)
    assert not delivery(before, after, after + rounding).missing
    assert delivery(before, after, before + rounding).missing


def test_an_update_too_small_to_be_seen_is_no_reason_to_stop():
    random = np.random.default_rng(1)
    before = random.normal(-2.0, 1.0, 64)
    assert not delivery(before, before, before).missing
    assert not delivery(before, before + 1e-6, before + random.normal(0.0, 0.01, 64)).missing
    assert correlation(before, before) == pytest.approx(1.0)
    assert correlation(np.ones(3), before[:3]) == 1.0


def test_a_name_stays_until_its_last_call_has_ended_and_comes_back_if_it_is_served_again():
    unused: list[str] = []
    names = ServedNames("a", 0)
    with names.call() as first, names.call():
        names.switch("b", 1, lambda: unused.append("a"))
        assert (first.name, names.newest.name, names.in_use, unused) == ("a", "b", ["a", "b"], [])
        assert not names.wait(1, 0.0)
        with names.call() as second:
            assert second.version == 1
            names.switch("a", 2, lambda: unused.append("b"))
            assert names.in_use == ["b", "a"]
        assert unused == ["b"]
    assert (names.in_use, unused, names.newest.version) == (["a"], ["b"], 2)
    assert names.wait(1, 0.0)


def test_a_token_is_trained_where_the_grammar_left_the_choice_to_the_policy():
    """Forced: everything else is forbidden. Free: 2 % are. The last has no log-probability of the policy's own."""
    pieces = [SampledPiece((5, 6), (0.0, -1.0), "ab"), SampledPiece((7,), (-0.5,), "c", "stop")]
    marked = mark_steered(pieces, [-3.0, -1.0 + math.log(0.98)])
    assert [piece.steered for piece in marked] == [(True, False), (True,)]
    assert marked[0].logprobs == pytest.approx((-3.0, -1.0 + math.log(0.98)))
    assert (marked[1].logprobs, marked[1].text, marked[1].finish_reason) == ((-0.5,), "c", "stop")


@pytest.mark.parametrize(("more", "known"), [({}, True), ({"temperature": 0.7}, False), ({"top_p": 0.9}, False)])
def test_steered_tokens_are_known_where_the_grammar_alone_changes_the_distribution(more, known):
    assert marks(Sampling(grammar="start: /a/", max_tokens=4, seed=1, **more)) is known
    assert not marks(Sampling(**more))
