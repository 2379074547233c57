"""Exact continuation: never a false join, never a drift, and a reason wherever a prompt stands alone."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_trainer.gateway.prompt.equality import Conversation, same_data
from lightning_trainer.reasons.continuation import ContinuationReason
from support.fakes import HERMES_TEMPLATE, ByteTokenizer
from support.gateway.continuation import (
    TOOL,
    USER,
    Talk,
    World,
    family_talks,
    names,
)

CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12+7"}}\n</tool_call>'
OTHER = {"role": "user", "content": "And you?"}


def strange(tokenizer):
    """An answer in tokens that the tokenizer would not give for its text."""
    return [tokenizer.merged, *b" apple", tokenizer.eos_token_id]


def test_tokens_that_the_tokenizer_would_not_give_again_are_kept():
    talk = Talk()
    first, whole, message = talk.ask([USER], strange(talk.tokenizer))
    second = talk.continuations.prompt([USER, message, OTHER], [TOOL], "a")
    assert (first.how, second.how) == (ContinuationReason.BEGINS, ContinuationReason.JOINED)
    assert second.ids[: len(whole)] == whole
    alone = talk.alone([USER, message, OTHER])
    assert talk.chat.decode(second.ids) == talk.chat.decode(alone.ids)
    assert second.ids != alone.ids


@pytest.mark.parametrize("arguments", ['{"expression":"12+7"}', '{ "expression" :  "12+7" }', '{"expression": "12+7"}'])
def test_a_tool_call_stays_as_sampled_however_the_agent_writes_it_down(arguments):
    talk = Talk()
    _, whole, message = talk.ask([USER], f'<tool_call>{{"arguments": {arguments}, "name":"calculator"}}</tool_call>')
    for call in message["tool_calls"]:
        call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]), indent=3)
    prompt = talk.continuations.prompt([USER, message, result(message)], [TOOL], "a")
    assert prompt.how == ContinuationReason.JOINED
    assert prompt.ids[: len(whole)] == whole
    assert talk.chat.decode(prompt.ids).endswith(
        "<tool_response>\n19\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    "rewrite",
    [
        lambda m: {**m, "content": "", "refusal": None, "annotations": [], "audio": None, "function_call": None},
        lambda m: {**m, "content": []},
        lambda m: {k: v for k, v in m.items() if k != "content"},
        lambda m: {**m, "tool_calls": [{**c, "index": 0, "type": "function"} for c in m["tool_calls"]]},
        lambda m: {**m, "tool_calls": [{"id": c["id"], "function": c["function"]} for c in m["tool_calls"]]},
    ],
)
def test_other_ways_to_write_the_same_message_are_the_same(rewrite):
    talk = Talk()
    _, whole, message = talk.ask([USER], CALL)
    prompt = talk.continuations.prompt([USER, rewrite(message), result(message)], [TOOL], "a")
    assert prompt.how == ContinuationReason.JOINED
    assert prompt.ids[: len(whole)] == whole


def test_ids_of_tool_calls_may_be_the_frameworks_own():
    talk = Talk()
    _, _, message = talk.ask([USER], CALL)
    message["tool_calls"][0]["id"] = "7"
    assert talk.continuations.prompt([USER, message, result(message)], [TOOL], "a").how == ContinuationReason.JOINED


def test_text_as_parts_and_developer_as_system_are_the_same():
    talk = Talk()
    _, _, message = talk.ask([{"role": "system", "content": "Be brief."}, USER], "19")
    parts = [{"type": "text", "text": "Be brief."}]
    again = [{"role": "developer", "content": parts}, USER, message, OTHER]
    assert talk.continuations.prompt(again, [TOOL], "a").how == ContinuationReason.JOINED


def test_a_client_that_tries_again_is_no_continuation_and_both_answers_can_be_continued():
    talk = Talk()
    _, one, message = talk.ask([USER], "19")
    again, two, _ = talk.ask([USER], [*b"19", talk.tokenizer.eos_token_id])
    assert again.how == ContinuationReason.BEGINS
    prompts = [talk.continuations.prompt([USER, message, OTHER], [TOOL], "a") for _ in range(2)]
    assert {prompt.how for prompt in prompts} == {ContinuationReason.JOINED}
    assert {prompt.ids[: len(one)] for prompt in prompts} == {one, two}


def test_interleaved_conversations_and_branches_each_continue_their_own():
    talk = Talk()
    _, one, message = talk.ask([USER], strange(talk.tokenizer))
    _, two, _ = talk.ask([OTHER], strange(talk.tokenizer))
    branches = [[USER, message, {"role": "user", "content": text}] for text in ("left", "right")]
    for messages, before in ((branches[0], one), (branches[1], one), ([OTHER, message, USER], two)):
        prompt = talk.continuations.prompt(messages, [TOOL], "a")
        assert prompt.how == ContinuationReason.JOINED
        assert prompt.ids[: len(before)] == before


def test_the_longest_earlier_call_is_continued_and_steps_may_be_skipped():
    talk = Talk()
    messages = [USER]
    for answer in ("one", "two", "three"):
        _, whole, message = talk.ask(messages, strange(talk.tokenizer) if answer == "one" else answer)
        messages = [*messages, message, OTHER]
    prompt = talk.continuations.prompt(messages, [TOOL], "a")
    assert prompt.ids[: len(whole)] == whole
    foreign = [*messages, {"role": "assistant", "content": "said by another model"}, USER]
    prompt = talk.continuations.prompt(foreign, [TOOL], "a")
    assert prompt.how == ContinuationReason.JOINED
    assert prompt.ids[: len(whole)] == whole


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda m: [{**m[0], "content": "Be long."}, *m[1:]], ContinuationReason.SYSTEM_CHANGED),
        (lambda m: m[1:], ContinuationReason.SYSTEM_CHANGED),
        (lambda m: [m[0], {**m[1], "content": "What is 12+8?"}, *m[2:]], ContinuationReason.EDITED),
        (lambda m: [m[0], m[3], m[2], m[1]], ContinuationReason.EDITED),
        (lambda m: [m[0], m[2], m[3]], ContinuationReason.WINDOW),
        (
            lambda m: [m[0], m[1], {**m[2], "content": "20"}, m[3]],
            ContinuationReason.BEGINS,
        ),  # no answer of ours is in it
    ],
)
def test_a_changed_history_stands_alone_and_says_why(change, why):
    talk = Talk()
    messages = [{"role": "system", "content": "Be brief."}, USER]
    _, _, message = talk.ask(messages, strange(talk.tokenizer))
    changed = change([*messages, message, OTHER])
    prompt = talk.continuations.prompt(changed, [TOOL], "a")
    assert prompt.how == why
    assert prompt.ids == talk.alone(changed).ids


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda m: [m[0], *m[3:]], "WINDOW"),
        (lambda m: [m[0], *m[2:]], "WINDOW"),
        (lambda m: [m[0], m[1], *m[5:]], "WINDOW"),  # the task kept, the middle left out
        (lambda m: [m[0], {"role": "user", "content": "So far: 19, 20."}, *m[5:]], "COMPACTED"),
        (lambda m: [{"role": "system", "content": "Be brief. So far: 19, 20."}, *m[5:]], "COMPACTED"),
        (lambda m: [m[0], {"role": "user", "content": "So far: 19, 20, 21."}, m[-1]], "BEGINS"),
        (lambda m: [m[0], m[1], m[2], {**m[3], "content": "edited"}, *m[4:]], "JOINED"),  # to the first answer
        (lambda m: [m[0], m[5], m[6], m[1], m[2], m[-1]], "EDITED"),
        (lambda m: [{"role": "user", "content": "You are another. Add 1 and 2."}], "BEGINS"),  # a sub-agent
    ],
)
def test_context_that_a_program_manages_has_a_rule(change, why):
    talk, messages = Talk(), [{"role": "system", "content": "Be brief."}]
    for number in range(3):
        messages.append({"role": "user", "content": f"question {number}"})
        _, _, message = talk.ask(messages, f"answer {number}")
        messages.append(message)
    changed = change([*messages, OTHER])
    prompt = talk.continuations.prompt(changed, [TOOL], "a")
    assert prompt.how == ContinuationReason[why]
    assert talk.chat.decode(prompt.ids) == talk.chat.decode(talk.alone(changed).ids)


def test_changed_tools_stand_alone_and_say_so():
    talk = Talk()
    _, _, message = talk.ask([USER], "19")
    more = {"type": "function", "function": {"name": "search", "parameters": {}}}
    prompt = talk.continuations.prompt([USER, message, OTHER], [TOOL, more], "a")
    assert prompt.how == ContinuationReason.TOOLS_CHANGED
    assert prompt.ids == talk.alone([USER, message, OTHER], [TOOL, more]).ids


def test_a_changed_call_stands_alone():
    talk = Talk()
    _, _, message = talk.ask([USER], CALL)
    changed = copy.deepcopy(message)
    changed["tool_calls"][0]["function"]["arguments"] = '{"expression": "1+1"}'
    prompt = talk.continuations.prompt([USER, changed, result(message)], [TOOL], "a")
    assert prompt.how == ContinuationReason.BEGINS
    assert '"1+1"' in talk.chat.decode(prompt.ids)


@pytest.mark.parametrize("answer", [f"{CALL}\nDone.", CALL + CALL.replace("12", "13")])
def test_an_answer_that_the_agent_did_not_see_whole_is_not_put_into_its_history(answer):
    talk = Talk()
    prompt = talk.continuations.prompt([USER], [TOOL], "a")
    message = talk.chat.parse(answer, [TOOL]).message()
    message["tool_calls"] = message["tool_calls"][:1]
    talk.continuations.remember("a", prompt, [*talk.chat.encode(answer), 257], message)
    messages = [USER, message, result(message)]
    prompt = talk.continuations.prompt(messages, [TOOL], "a")
    assert prompt.how == ContinuationReason.HIDDEN
    assert prompt.ids == talk.alone(messages).ids


@pytest.mark.parametrize(("sampled", "shown"), [(b"19. Stop", "19. "), ("19 é".encode()[:-1], "19 ")])
def test_a_stop_string_and_half_a_letter_are_no_rewriting(sampled, shown):
    talk = Talk()
    prompt = talk.continuations.prompt([USER], [TOOL], "a")
    message = {"role": "assistant", "content": shown}
    talk.continuations.remember("a", prompt, list(sampled), message)
    assert talk.continuations.prompt([USER, message, OTHER], [TOOL], "a").how == ContinuationReason.HIDDEN


@pytest.mark.parametrize("gives_back", [False, True])
def test_dropped_reasoning_forks_and_goes_on_while_it_is_shown(gives_back):
    from support.models.families import THINKING

    talk = Talk(ByteTokenizer(THINKING))
    _, _, message = talk.ask([USER], f"<think>\nhm\n</think>\n\n{CALL}")
    assert message["reasoning_content"] == "hm"
    if not gives_back:
        del message["reasoning_content"]  # as most frameworks do
    messages = [USER, message, result(message)]
    prompt, _, answer = talk.ask(messages, [*b"<think>\nso\n</think>\n\n", *strange(talk.tokenizer)])
    assert prompt.how == ContinuationReason.JOINED
    assert "hm" in talk.chat.decode(prompt.ids)
    messages += [answer, OTHER]
    prompt, forked, answer = talk.ask(messages, "<think>\nas\n</think>\n\n20")
    assert prompt.how == ContinuationReason.FORKED
    assert "think" not in talk.chat.decode(prompt.ids)
    assert talk.tokenizer.merged in prompt.ids  # the rest of the answer has its own tokens
    assert talk.chat.decode(prompt.ids) == talk.chat.decode(talk.alone(messages).ids)
    messages += [answer, USER]
    prompt = talk.continuations.prompt(messages, [TOOL], "a")
    assert prompt.how == ContinuationReason.FORKED
    shown = forked[: len(forked) - len("<think>\nas\n</think>\n\n20") - 1]
    assert prompt.ids[: len(shown)] == shown  # up to the newest answer the rows are one


def test_reasoning_that_begins_in_the_prompt_forks_too():
    pytest.importorskip("transformers")
    from support.models.model_families import all_families, tokenizer_of

    family = {family.name: family for family in all_families()}.get("Qwen3.5")
    if family is None:
        pytest.skip("trl's templates are not here")
    talk = Talk(tokenizer_of(family))
    first, _, message = talk.ask([USER], "hm\n</think>\n\nthe man")
    assert talk.chat.decode(first.ids).endswith("<think>\n")
    assert message == {"role": "assistant", "content": "the man", "reasoning_content": "hm"}
    prompt = talk.continuations.prompt([USER, message, OTHER], [TOOL], "a")
    assert prompt.how == ContinuationReason.FORKED
    assert talk.chat.decode(prompt.ids) == talk.chat.decode(talk.alone([USER, message, OTHER]).ids)


def test_an_answer_cut_by_length_goes_on_where_it_was_cut():
    talk = Talk()
    _, whole, message = talk.ask([USER], [talk.tokenizer.merged, *b" app"])
    prompt = talk.continuations.prompt([USER, message, OTHER], [TOOL], "a")
    assert (prompt.how, prompt.ids[: len(whole)]) == (ContinuationReason.JOINED, whole)
    assert prompt.ids[len(whole)] == talk.tokenizer.eos_token_id


def test_a_message_that_imitates_an_answer_is_not_taken_for_one():
    talk = Talk()
    _, _, message = talk.ask([USER], strange(talk.tokenizer))
    rendered = talk.chat.decode(talk.alone([USER, message, OTHER]).ids)
    inside = rendered.removeprefix(rendered[: rendered.index("What")]).removesuffix(
        "<|im_end|>\n<|im_start|>assistant\n"
    )
    spoof = [{"role": "user", "content": inside}]  # renders to the very same text
    prompt = talk.continuations.prompt(spoof, [TOOL], "a")
    assert talk.chat.decode(prompt.ids) == rendered
    assert prompt.how == ContinuationReason.BEGINS
    assert talk.tokenizer.merged not in prompt.ids


def test_another_attempts_tokens_are_never_used():
    talk = Talk()
    _, _, message = talk.ask([USER], strange(talk.tokenizer))
    for attempt in ("b", None):
        assert talk.tokenizer.merged not in talk.continuations.prompt([USER, message, OTHER], [TOOL], attempt).ids
    talk.continuations.forget("a")
    assert talk.tokenizer.merged not in talk.continuations.prompt([USER, message, OTHER], [TOOL], "a").ids


def test_what_is_remembered_is_bounded_and_what_was_forgotten_is_said():
    talk = Talk(remembered_bytes=60_000)
    for number in range(300):
        _, _, message = talk.ask([USER], "x" * 500, attempt=f"attempt {number}")
    for _ in range(300):
        talk.ask([USER], "x" * 500, attempt="long")
    kept = talk.continuations
    assert 0 < kept._size <= 60_000
    assert kept._size == sum(memory.size for memory in kept._memories.values())
    assert kept.prompt([USER, message, OTHER], [TOOL], "attempt 3").how == ContinuationReason.FORGOTTEN
    for number in range(300):
        kept.forget(f"attempt {number}")
    kept.forget("long")
    assert kept._size == 0


def test_a_conversation_takes_memory_in_proportion_to_its_tokens():
    talk = Talk(remembered_bytes=200_000)
    messages, whole = [USER], ()
    for number in range(40):
        prompt, longer, message = talk.ask(messages, strange(talk.tokenizer), tools=())
        assert prompt.how == (ContinuationReason.JOINED if number else ContinuationReason.BEGINS)
        assert longer[: len(whole)] == whole
        whole, messages = longer, [*messages, message, {"role": "user", "content": f"{number}" * 50}]
    assert 4 * len(whole) <= talk.continuations._size <= 4 * len(whole) + 40 * 500


def test_a_call_whose_earlier_calls_are_dropped_while_it_is_answered_is_kept_whole():
    talk = Talk(remembered_bytes=200_000)
    _, _, message = talk.ask([USER], strange(talk.tokenizer))
    messages = [USER, message, OTHER]
    prompt = talk.continuations.prompt(messages, [TOOL], "a")
    talk.continuations._evict("a")
    talk.continuations.remember("a", prompt, [*b"no", talk.tokenizer.eos_token_id], {"content": "no"})
    assert talk.continuations._size >= 4 * len(prompt.ids)
    later = talk.continuations.prompt([*messages, {"role": "assistant", "content": "no"}, USER], [TOOL], "a")
    assert (later.how, later.ids[: len(prompt.ids)]) == (ContinuationReason.JOINED, prompt.ids)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ('{"a":1,"b":[2]}', '{"b": [2.0], "a": 1.0}', True),
        ('{"a": 1e22}', '{"a": 10000000000000000000000}', True),
        ('{"a": 0.10}', '{"a": 0.1}', True),
        ('{"a": "\\u00e9"}', '{"a": "é"}', True),
        ('{"a": 12345678901234567890123}', '{"a": 12345678901234567890124}', False),
        ('{"a": 1}', '{"a": true}', False),
        ('{"a": 1.5}', '{"a": "1.5"}', False),
        ('{"a": null}', "{}", False),
        ("not json", "not  json", False),
        ('{"a": NaN}', '{"a": NaN}', True),
        ("[" * 99_999, "[" * 99_998, False),
    ],
)
def test_arguments_are_compared_by_what_they_mean(one, other, same):
    assert (same_data(one) == same_data(other)) is same


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(_json, _json)
def test_data_written_again_is_the_same_and_other_data_is_not(one, other):
    assert same_data(json.dumps(one)) == same_data(json.dumps(json.loads(json.dumps(one, indent=1))))
    if one != other:
        assert same_data(json.dumps(one)) != same_data(json.dumps(other))


@pytest.mark.parametrize("other", ["assistant", "system", "tool"])
def test_who_said_it_counts(other):
    assert Conversation().add(USER) != Conversation().add({**USER, "role": other})


@given(st.text(max_size=9), st.text(max_size=9), st.sampled_from(["user", "assistant", "system"]))
def test_messages_do_not_run_into_each_other(one, other, role):
    whole, parts = Conversation(), Conversation()
    parts.add({"role": role, "content": one})
    assert whole.add({"role": role, "content": one + other}) != parts.add({"role": role, "content": other})


# Random conversations over the templates of several model families.


@pytest.mark.parametrize("name", names())
@settings(max_examples=10, deadline=None)
@given(rng=st.randoms(use_true_random=False))
def test_conversations_are_never_joined_falsely_and_never_drift(name, rng):
    pytest.importorskip("transformers")
    tokenizer = family_talks().get(name)
    if tokenizer is None:
        pytest.skip(f"the package that brings the template of {name} is not installed")
    world = World(tokenizer, rng)
    for _ in range(12):
        world.step()


def test_plain_conversations_are_joined_whole():
    world = World(ByteTokenizer(HERMES_TEMPLATE), random.Random(7))
    world.tools = ()
    for _ in range(60):
        world.step()
    assert world.joined > 5 * world.alone


def result(message: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "19"}
