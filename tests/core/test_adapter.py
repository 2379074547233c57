"""Transitions: one for each choice of each model call, none left out and none made up."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lightning_conformance.stores.samples import a_call, a_reward, a_span
from lightning_spans.adapter.adapt import adapt
from lightning_spans.adapter.trace import Trace
from lightning_spans.hooks import manager
from lightning_spans.schema.calls import Choice
from lightning_spans.schema.spans import EXECUTE_TOOL, REQUEST, REQUEST_MODEL, RESPONSE, RESPONSE_ID, Span
from lightning_spans.schema.transitions import Tokens

T = "0af7651916cd43dd8448eb211c80319c"
OURS = {"rollout_id": "r", "attempt_id": "a"}


def chat(place: int, **changes: Any) -> Span:
    """The chat span of the call with the same number."""
    attributes = {RESPONSE_ID: f"r{place}", **changes.pop("attributes", {})}
    values = {"span_id": f"s{place}", "trace_id": T, "start_ns": place, "end_ns": place + 1, "agent": "writer"}
    return a_span(**{**values, **OURS, "attributes": attributes, **changes})


def call(place: int, **changes: Any) -> Any:
    return a_call(
        **{"response_id": f"r{place}", "trace_id": T, "span_id": f"s{place}", "start_ns": place, **OURS, **changes}
    )


def test_a_call_becomes_a_transition() -> None:
    request = {"messages": [{"role": "user", "content": "hi"}]}
    recorded = call(1, request=request, sampling={"temperature": 1.0})
    (transition,) = adapt(Trace.build([chat(1)], [recorded]))
    assert (transition.rollout_id, transition.attempt_id, transition.agent) == ("r", "a", "writer")
    assert (transition.turn, transition.choice, transition.span_id, transition.response_id) == (0, 0, "s1", "r1")
    assert transition.tokens == Tokens((1, 2), (3, 4), (-0.1, -0.2))
    assert (transition.policy, transition.policy_version) == ("policy", 3)
    assert (transition.request, transition.message) == (request, {"role": "assistant", "content": "hi"})
    assert (transition.finish_reason, transition.sampling, transition.error) == ("stop", {"temperature": 1.0}, None)


def test_turns_count_all_calls_of_the_attempt_in_the_order_of_their_start() -> None:
    spans = [chat(3, agent="b"), chat(1, agent="a"), chat(2, agent="b"), chat(0, operation=EXECUTE_TOOL)]
    transitions = adapt(Trace.build(spans, [call(2), call(3)]))
    assert [(each.turn, each.span_id, each.agent) for each in transitions] == [
        (0, "s1", "a"),
        (1, "s2", "b"),
        (2, "s3", "b"),
    ]
    assert [each.tokens is not None for each in transitions] == [False, True, True]


@pytest.mark.parametrize("operation", ["embeddings", EXECUTE_TOOL, "invoke_agent", "text_completion"])
def test_only_chats_are_transitions(operation: str) -> None:
    assert adapt(Trace.build([chat(1, operation=operation)])) == []


def test_all_choices_and_equal_prompts_are_kept() -> None:
    choices = tuple(Choice(n, (n,), (-0.5,), "stop", {"content": str(n)}) for n in range(3))
    transitions = adapt(Trace.build([chat(1), chat(2)], [call(1, choices=choices), call(2, choices=choices[:1])]))
    assert [(each.turn, each.choice) for each in transitions] == [(0, 0), (0, 1), (0, 2), (1, 0)]
    assert [each.tokens.response for each in transitions if each.tokens] == [(0,), (1,), (2,), (0,)]
    assert [each.message["content"] for each in transitions] == ["0", "1", "2", "0"]


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt_token_ids": None},
        {"prompt_token_ids": ()},
        {"choices": (Choice(0, None, (-0.1,), "stop"),)},
        {"choices": (Choice(0, (3,), None, "stop"),)},
        {"choices": (Choice(0, (3, 4), (-0.1,), "stop"),)},
        {"choices": (Choice(0, (), (), "stop"),)},
    ],
)
def test_tokens_that_do_not_fit_are_no_tokens(changes: dict[str, Any]) -> None:
    (transition,) = adapt(Trace.build([chat(1)], [call(1, **changes)]))
    assert transition.tokens is None
    assert transition.policy_version == 3


def test_a_failed_call_is_kept_with_its_error() -> None:
    failed = call(1, error="engine stopped", choices=())
    spans = [chat(1, status="error", status_message="500: no"), chat(2, status="error", attributes={"error.type": "E"})]
    spans += [chat(3, status="error"), chat(4)]
    transitions = adapt(Trace.build(spans, [failed, call(4, error="cut off")]))
    assert [each.error for each in transitions] == ["500: no", "E", "error", "cut off"]
    assert transitions[0].tokens is None
    assert [each.error for each in adapt(Trace.build([], [failed]))] == ["engine stopped"]


@pytest.mark.parametrize("recorded", [[], [call(1)]], ids=["span alone", "with its gateway call"])
def test_a_whole_answer_that_the_client_refused_is_no_failure(recorded: list[Any]) -> None:
    body = {"id": "r1", "choices": [{"index": 0, "message": {"content": "?"}, "finish_reason": "stop"}]}
    span = chat(1, status="error", status_message="not what was asked for", attributes={RESPONSE: json.dumps(body)})
    (transition,) = adapt(Trace.build([span], recorded))
    assert (transition.finish_reason, transition.error) == ("stop", None)


def test_an_answer_that_broke_off_is_a_failure() -> None:
    body = {"id": "r1", "choices": [{"index": 0, "message": {"content": "so"}}]}
    span = chat(1, status="error", status_message="cut", attributes={RESPONSE: json.dumps(body)})
    assert [each.error for each in adapt(Trace.build([span]))] == ["cut"]
    whole = chat(1, status="error", status_message="refused")
    assert [each.error for each in adapt(Trace.build([whole], [call(1, error="engine stopped")]))] == ["refused"]


def test_without_a_gateway_everything_comes_from_the_span() -> None:
    request = {"model": "asked", "messages": []}
    content = [{"logprob": -0.5}]
    choices = [
        {
            "index": n,
            "message": {"content": str(n)},
            "finish_reason": "stop",
            "token_ids": [n],
            "logprobs": {"content": content},
        }
        for n in range(2)
    ]
    body = {"id": "r1", "model": "answered", "prompt_token_ids": [1], "choices": choices}
    attributes = {REQUEST: json.dumps(request), RESPONSE: json.dumps(body), REQUEST_MODEL: "asked"}
    one, two = adapt(Trace.build([chat(1, attributes=attributes)]))
    assert (one.request, one.policy, one.policy_version, one.sampling) == (request, "answered", None, {})
    assert [one.tokens, two.tokens] == [Tokens((1,), (0,), (-0.5,)), Tokens((1,), (1,), (-0.5,))]
    assert (two.choice, two.message, two.finish_reason) == (1, {"content": "1"}, "stop")


def test_a_text_completion_is_read_without_a_gateway_too() -> None:
    flat = {"tokens": ["1", "9"], "token_logprobs": [-0.5, -0.25], "text_offset": [0, 1]}
    choice = {"index": 0, "text": "19", "logprobs": flat, "finish_reason": "length", "token_ids": [3, 4]}
    body = {"id": "cmpl-1", "object": "text_completion", "choices": [{**choice, "prompt_token_ids": [1, 2]}]}
    attributes = {REQUEST: json.dumps({"prompt": "12+7="}), RESPONSE: json.dumps(body)}
    (transition,) = adapt(Trace.build([chat(1, attributes=attributes)]))
    assert transition.tokens == Tokens((1, 2), (3, 4), (-0.5, -0.25))
    assert (transition.message, transition.finish_reason) == ({"role": "assistant", "content": "19"}, "length")


@pytest.mark.parametrize("second", [[7, 8, 9], [1, 2], "malformed"])
def test_choices_that_answer_several_prompts_have_no_tokens(second) -> None:
    flat = {"tokens": ["a"], "token_logprobs": [-0.5], "text_offset": [0]}
    choices = [
        {"index": n, "text": "a", "logprobs": flat, "finish_reason": "stop", "token_ids": [10], "prompt_token_ids": ids}
        for n, ids in enumerate([[1, 2, 3], second])
    ]
    attributes = {RESPONSE: json.dumps({"id": "cmpl-1", "choices": choices})}
    assert [one.tokens for one in adapt(Trace.build([chat(1, attributes=attributes)]))] == [None, None]
    attributes = {RESPONSE: json.dumps({"id": "cmpl-1", "choices": [choices[0], {**choices[0], "index": 1}]})}
    tokens = Tokens((1, 2, 3), (10,), (-0.5,))
    assert [one.tokens for one in adapt(Trace.build([chat(1, attributes=attributes)]))] == [tokens, tokens]


def test_a_responses_body_gives_its_output_as_the_message() -> None:
    output = [{"type": "message", "content": [{"type": "output_text", "text": "hi"}]}]
    attributes = {RESPONSE: json.dumps({"id": "resp_1", "status": "completed", "output": output})}
    (transition,) = adapt(Trace.build([chat(1, attributes=attributes)]))
    assert (transition.message["output"], transition.finish_reason, transition.tokens) == (output, "stop", None)
    attributes = {RESPONSE: json.dumps({"output": output, "incomplete_details": {"reason": "max_output_tokens"}})}
    (transition,) = adapt(Trace.build([chat(1, attributes=attributes)]))
    assert transition.finish_reason == "max_output_tokens"


def test_a_span_without_request_or_response_is_still_a_transition() -> None:
    (transition,) = adapt(Trace.build([chat(1, attributes={REQUEST_MODEL: "asked"})]))
    assert (transition.request, transition.message, transition.tokens, transition.policy) == ({}, {}, None, "asked")


def test_a_reward_of_a_span_goes_to_every_choice_of_its_call() -> None:
    own = a_reward(span_id="s1", **OURS)
    others = [a_reward(span_id="tool", **OURS), a_reward(**OURS)]
    choices = tuple(Choice(n, (n,), (-0.5,), "stop") for n in range(2))
    trace = Trace.build([chat(1), chat(2)], [call(1, choices=choices)], [own, *others])
    assert [each.rewards for each in adapt(trace)] == [(own,), (own,), ()]
    assert trace.rewards == (own, *others)


def test_a_reward_of_a_merged_span_is_not_lost() -> None:
    inner = chat(2, span_id="gateway", parent_id="s1", attributes={RESPONSE_ID: "r1"})
    reward = a_reward(span_id="gateway", **OURS)
    (transition,) = adapt(Trace.build([chat(1), inner], [], [reward]))
    assert transition.rewards == (reward,)


def test_a_trace_outside_a_runner_stands_for_its_attempt() -> None:
    (transition,) = adapt(Trace.build([chat(1, rollout_id=None, attempt_id=None)]))
    assert (transition.rollout_id, transition.attempt_id) == (T, T)


def test_the_hook_answers_last_for_every_trace() -> None:
    trace = Trace.build([chat(1)])
    assert adapt(trace) == manager().hook.lightning_adapt(trace=trace)
    (implementation,) = manager().hook.lightning_adapt.get_hookimpls()
    assert implementation.trylast
