"""The JSON form of every record, both ways."""

from __future__ import annotations

import dataclasses
import math
import pickle
from typing import Any

import pytest
from hypothesis import given

from lightning_conformance.stores import samples
from lightning_conformance.stores.samples import a_call, a_reward, a_rollout, a_span
from lightning_spans.schema import json as records
from lightning_spans.schema.attempts import Attempt, AttemptRecord, End, Rollout
from lightning_spans.schema.calls import Call, Choice
from lightning_spans.schema.json import JsonText, dumps, from_json, loads, to_json
from lightning_spans.schema.rewards import Reward
from lightning_spans.schema.spans import Span
from lightning_spans.schema.transitions import Transition

CONTEXT = Attempt("r", "r.1", "http://127.0.0.1:1", "key", ("writer", "re*"), "policy")
ATTEMPT = AttemptRecord(
    attempt_id="r.1", rollout=a_rollout(), number=1, fence=7, worker="w", lease_until_ns=2**62, context=CONTEXT
)


def through_json(record: Any) -> Any:
    return from_json(type(record), loads(dumps(to_json(record))))


@given(samples.spans())
def test_a_span_survives_json(span: Span) -> None:
    assert through_json(span) == span


@given(samples.calls())
def test_a_call_survives_json(call: Call) -> None:
    assert through_json(call) == call


@given(samples.rewards())
def test_a_reward_survives_json_to_the_last_bit(reward: Reward) -> None:
    assert through_json(reward) == reward


@given(samples.rollouts())
def test_a_rollout_survives_json(rollout: Rollout) -> None:
    assert through_json(rollout) == rollout


@pytest.mark.parametrize("record", [ATTEMPT, dataclasses.replace(ATTEMPT, context=None, ended_ns=5, error="it broke")])
def test_an_attempt_survives_json_with_its_context(record: AttemptRecord) -> None:
    assert through_json(record) == record


@pytest.mark.parametrize("kind", [Span, Call, Choice, Reward, Rollout, Attempt, AttemptRecord, End, Transition])
def test_every_field_has_a_reader_and_one_of_an_unknown_type_is_an_error(kind: type) -> None:
    assert [name for name, _ in records._readers(kind)] == [field.name for field in dataclasses.fields(kind)]
    odd = dataclasses.make_dataclass("Odd", [("value", complex)])
    with pytest.raises(KeyError, match="complex"):
        from_json(odd, {"value": 1})


def test_an_end_survives_json_with_its_rewards() -> None:
    end = End("a", 3, "failed", (a_reward(),), "it broke")
    assert through_json(end) == end
    with pytest.raises(ValueError, match=r"End\.rewards: Reward\.value: must be a number"):
        from_json(End, {**to_json(end), "rewards": [{"value": "1"}]})


def test_json_has_plain_lists_and_objects_only() -> None:
    plain = to_json(a_call(request=JsonText('{"model": "m"}')))
    assert (plain["prompt_token_ids"], plain["request"]) == ([1, 2], {"model": "m"})
    assert type(plain["choices"][0]) is dict
    assert type(plain["request"]) is dict
    assert to_json(ATTEMPT)["context"]["agents"] == ["writer", "re*"]


def test_a_newer_writers_fields_are_ignored() -> None:
    span = a_span()
    assert from_json(Span, {**to_json(span), "weight": 3}) == span


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        (Span, {"span_id": 3}, r"Span\.span_id: must be text, not int"),
        (Span, {"status": "fine"}, r"Span\.status: must be one of ok, error, unset, not 'fine'"),
        (Span, {"start_ns": 1.5}, r"Span\.start_ns: must be a whole number"),
        (Span, {"attributes": []}, r"Span\.attributes: must be an object"),
        (Call, {"prompt_token_ids": [1, "2"]}, r"Call\.prompt_token_ids"),
        (Call, {"prompt_token_ids": [2**31]}, r"Call\.prompt_token_ids"),
        (Call, {"choices": [{"index": 0, "token_ids": None, "logprobs": [None]}]}, r"Call\.choices: Choice\.logprobs"),
        (Reward, {"value": None}, r"Reward\.value: must be a number, not NoneType"),
        (Reward, {"value": True}, r"Reward\.value: must be a number, not bool"),
        (Rollout, {"max_attempts": "2"}, r"Rollout\.max_attempts"),
    ],
)
def test_a_wrong_type_is_refused_by_name(kind: Any, change: dict[str, Any], message: str) -> None:
    good = {Span: a_span, Call: a_call, Reward: a_reward, Rollout: a_rollout}[kind]()
    with pytest.raises(ValueError, match=message):
        from_json(kind, {**to_json(good), **change})


def test_a_missing_field_is_named() -> None:
    with pytest.raises(ValueError, match=r"Reward: .*'value'"):
        from_json(Reward, {"rollout_id": "r", "attempt_id": "a"})
    with pytest.raises(ValueError, match="a Reward must be a JSON object, not list"):
        from_json(Reward, [])


@pytest.mark.parametrize(
    "value", [{"half": "\ud83d"}, {"big": 2**70 + 1, "whole": 1}, {"plain": "é", "nested": [1, {}]}]
)
def test_what_one_library_refuses_the_other_writes(value: Any) -> None:
    assert loads(dumps(value)) == value
    assert loads(dumps(value).decode()) == value


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("beside", [1, 2**64])
def test_what_json_has_not_is_null(number: float, beside: int) -> None:
    assert loads(dumps({"is": [number], "beside": beside})) == {"is": [None], "beside": beside}


def test_half_an_emoji_from_elsewhere_is_read() -> None:
    assert loads(b'{"half":"\\ud83d"}') == {"half": "\ud83d"}


def test_keys_that_are_no_text_and_odd_containers_are_written() -> None:
    assert loads(dumps({1: {"b", "a"}, "text": JsonText('{"a": 1}')})) == {"1": ["a", "b"], "text": {"a": 1}}
    assert loads(dumps({"nan": math.nan})) == {"nan": None}


def test_what_is_no_json_is_refused() -> None:
    with pytest.raises(ValueError, match="object is not JSON-like"):
        dumps({"what": object()})
    for text in (b"", b"{", " nonsense"):
        with pytest.raises(ValueError, match=r"Expecting|line 1"):
            loads(text)


def test_json_text_is_parsed_when_looked_into_and_equals_its_value() -> None:
    text = JsonText('{"a": [1, 2]}')
    assert text._value is None
    assert text == {"a": [1, 2]}
    assert (text["a"], len(text), list(text), "b" in text) == ([1, 2], 1, ["a"], False)
    assert pickle.loads(pickle.dumps(text)) == text
    assert repr(text) == "JsonText('{\"a\": [1, 2]}')"
