"""Calls that were not drawn from the policy alone never enter training as if they were."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_trainer.rl.account import UntrainedReason
from lightning_trainer.rl.rows import token_weights, why_untrainable
from lightning_trainer.rl.steered import steering
from support.rl.calls import call, rows_of


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_p", 0.9), ("top_k", 40), ("min_p", 0.05), ("presence_penalty", 0.5), ("frequency_penalty", -0.5),
        ("repetition_penalty", 1.1), ("logit_bias", {"50": 100}), ("response_format", {"type": "json_object"}),
        ("tool_choice", "required"), ("tool_choice", {"type": "function", "function": {"name": "f"}}),
        ("allowed_token_ids", [5]), ("structured_outputs", {"choice": ["a", "b"]}), ("guided_choice", ["a"]),
        ("ignore_eos", True), ("min_tokens", 4), ("bad_words", ["no"]), ("use_beam_search", True),
    ],
)  # fmt: skip
def test_call_that_a_parameter_steered_is_left_out_and_counted(name: str, value: object) -> None:
    there = call(0, [1, 2], [3, 4], request={name: value})
    assert steering(there) == name
    rows, account = rows_of([there, call(1, [9], [8, 7])])
    assert len(rows) == 1
    assert account.dropped == {UntrainedReason.STEERED: 1}
    assert any("not sampled from the policy only" in line for line in account.lines())


@pytest.mark.parametrize(
    "request_",
    [
        {}, {"top_p": 1}, {"top_p": 1.0, "top_k": -1, "min_p": 0}, {"logit_bias": {}, "tool_choice": "auto"},
        {"response_format": {"type": "text"}, "repetition_penalty": 1.0, "top_k": None}, {"stop": ["x"], "seed": 3},
    ],
)  # fmt: skip
def test_values_that_change_nothing_are_trained(request_: dict[str, object]) -> None:
    assert why_untrainable(call(0, [1], [2], request=request_)) is None


def test_what_the_gateway_left_out_of_a_request_was_not_in_force() -> None:
    there = call(0, [1], [2], request={"top_p": 0.9, "min_p": 0.1})
    plain = {"top_p": 1.0, "top_p_asked": 0.9, "min_p_asked": 0.1}
    assert why_untrainable(type(there)(**{n: getattr(there, n) for n in there.__slots__} | {"sampling": plain})) is None
    forced = {**plain, "structured_outputs": {"grammar": "x"}}
    steered = type(there)(**{n: getattr(there, n) for n in there.__slots__} | {"sampling": forced})
    assert why_untrainable(steered) == UntrainedReason.STEERED


def steered_call(places: list[int], turn: int = 0, prompt: tuple[int, ...] = (1, 2), **other: object):  # type: ignore[no-untyped-def]
    there = call(turn, prompt, [3, 4, 5], request={"response_format": {"type": "json_object"}}, **other)
    sampling = {"grammar": "start: x", "steered": {"0": places}}
    return type(there)(**{n: getattr(there, n) for n in there.__slots__} | {"sampling": sampling})


def test_forced_tokens_are_context_and_the_others_are_trained() -> None:
    there = steered_call([0, 2])
    [row], account = rows_of([there])
    assert row.mask.tolist() == [False, False, False, True, False]
    assert row.advantages[row.mask].tolist() == [1.0]
    assert row.logprobs[row.mask].tolist() == [np.float32(there.tokens.logprobs[1])]
    assert (row.lengths, account.tokens, account.tokens_steered) == ((1,), 1, 2)
    assert token_weights([row], "sequence-mean")[0].tolist() == [1.0]
    assert account.metrics()["tokens_steered"] == 2.0


def test_calls_merge_over_forced_tokens() -> None:
    first, second = steered_call([1]), call(1, [1, 2, 3, 4, 5, 6], [7])
    [row], _ = rows_of([first, call_like(second, first)])
    assert row.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert row.mask.tolist() == [False, False, True, False, True, False, True]
    assert row.lengths == (2, 1)
    assert row.advantages.tolist() == [0, 0, 1, 0, 1, 0, 2]


def call_like(one, other):  # type: ignore[no-untyped-def]
    return type(one)(**{n: getattr(one, n) for n in one.__slots__} | {"attempt_id": other.attempt_id})


def test_call_of_forced_tokens_alone_is_left_out() -> None:
    rows, account = rows_of([steered_call([0, 1, 2])])
    assert not rows
    assert account.dropped == {UntrainedReason.ALL_STEERED: 1}
