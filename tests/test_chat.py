"""Rendering of conversations, tool calls in the Hermes format, and prompts that continue what was sampled."""

from __future__ import annotations

import json
from importlib.resources import files
from itertools import pairwise

import pytest
from fakes import PLAIN_TEMPLATE, ByteTokenizer
from hypothesis import given
from hypothesis import strategies as st

from lightning_trainer.server.chat import ChatFormat
from lightning_trainer.server.hermes import StreamParser, parse
from lightning_trainer.server.refusals import Refusal

TOOL = {"type": "function", "function": {"name": "calculator", "description": "d", "parameters": {}}}
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12+7"}}\n</tool_call>'
USER = {"role": "user", "content": "What is 12+7?"}


def test_one_call_is_read():
    answer = parse(CALL)
    assert answer.content is None
    (call,) = answer.tool_calls
    assert call["type"] == "function"
    assert call["function"] == {"name": "calculator", "arguments": '{"expression": "12+7"}'}


def test_content_before_a_call_is_kept_and_what_follows_is_not():
    answer = parse(f"I will count.\n{CALL}\nDone.")
    assert answer.content == "I will count.\n"
    assert len(answer.tool_calls) == 1


def test_several_calls_are_parallel_and_have_different_ids():
    answer = parse(CALL * 3)
    assert len({call["id"] for call in answer.tool_calls}) == 3


def test_a_last_call_without_its_closing_tag_counts():
    assert len(parse(CALL + CALL.removesuffix("\n</tool_call>")).tool_calls) == 2


@pytest.mark.parametrize(
    "text",
    [
        "plain text",
        "",
        "<tool_call>",
        "<tool_call></tool_call>",
        "<tool_call>not json</tool_call>",
        '<tool_call>{"name": "calculator"}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>["calculator", {}]</tool_call>',
        '<tool_call>{"name": "calculator", "arguments": {"x": NaN}}</tool_call>',
        f"{CALL}<tool_call>broken</tool_call>",
        '<tool_call>{"name": "calculator", "arguments": {}} and more</tool_call>',
        "<tool_call>" + '{"name": "f", "arguments": ' + "[" * 100_000,
    ],
)
def test_any_fault_makes_the_whole_answer_plain_content(text):
    answer = parse(text)
    assert answer.content == text
    assert answer.tool_calls == ()


def test_arguments_keep_letters_of_every_language():
    (call,) = parse('<tool_call>{"name": "f", "arguments": {"q": "größe 北京"}}</tool_call>').tool_calls
    assert call["function"]["arguments"] == '{"q": "größe 北京"}'


_TEXTS = st.lists(
    st.sampled_from(
        [CALL, "<tool_call>", "</tool_call>", "<tool", "_call>", "<", "abc ", "\n", "{", '{"name": "f"', "é"]
    )
).map("".join)


@given(text=_TEXTS, cuts=st.lists(st.integers(0, 200)), tools=st.booleans())
def test_a_streamed_answer_is_the_one_sent_whole(text, cuts, tools):
    parser, sent = StreamParser(tools=tools), ""
    bounds = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    for start, end in pairwise(bounds):
        sent += parser.feed(text[start:end])
    rest, answer = parser.close()
    whole = parse(text) if tools else None
    assert sent + rest == (answer.content or "")
    assert answer.content == (whole.content if whole else text)
    assert [c["function"] for c in answer.tool_calls] == [c["function"] for c in (whole.tool_calls if whole else ())]


def test_content_is_streamed_before_the_answer_is_whole():
    parser = StreamParser(tools=True)
    assert parser.feed("Let me see") == "Let me see"
    assert parser.feed(" <tool") == " "
    assert parser.feed("box>") == "<toolbox>"


def test_a_template_without_tools_is_found_out_and_the_refusal_says_what_to_do():
    chat = ChatFormat(ByteTokenizer(PLAIN_TEMPLATE))
    with pytest.raises(Refusal, match="--chat-template hermes") as refused:
        chat.prompt([USER], [TOOL])
    assert refused.value.status == 400
    assert chat.prompt([USER], []).text.startswith("<|im_start|>user\nWhat is 12+7?")


def test_a_template_that_refuses_a_conversation_is_a_bad_request():
    chat = ChatFormat(ByteTokenizer("{{ messages[0].content.no_such.attribute }}"))
    with pytest.raises(Refusal, match="template") as refused:
        chat.prompt([USER], [])
    assert refused.value.status == 400


def test_text_parts_are_joined_and_developer_is_system():
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    text = ChatFormat(ByteTokenizer()).prompt([{"role": "developer", "content": parts}, USER], []).text
    assert text.startswith("<|im_start|>system\none\ntwo<|im_end|>")


def test_arguments_reach_the_template_as_data():
    message = {"role": "assistant", "content": None, "tool_calls": [_call("c", '{"expression":"12+7"}')]}
    text = ChatFormat(ByteTokenizer()).prompt([USER, message, _result("c")], [TOOL]).text
    assert CALL in text


@pytest.mark.parametrize("arguments", ['{"expression":"12+7"}', '{ "expression" :  "12+7" }', '{"expression": "12+7"}'])
def test_a_conversation_with_tool_calls_continues_token_for_token(arguments):
    chat = ChatFormat(ByteTokenizer())
    sampled = (
        f'<tool_call>{{"arguments": {arguments}, "name":"calculator"}}</tool_call>'  # not as the template writes it
    )
    first, ids, message = _sample(chat, [USER], sampled)
    given_back = json.loads(json.dumps(message))  # as a framework gives it: arguments parsed and written again
    for call in given_back["tool_calls"]:
        call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]))
    prompt = chat.prompt([USER, given_back, _result(message["tool_calls"][0]["id"])], [TOOL], "a")
    assert prompt.ids[: len(first.ids) + len(ids)] == (*first.ids, *ids)
    assert "<tool_response>\n19" in prompt.text


def test_tokens_that_the_tokenizer_would_not_give_again_are_kept():
    chat, tokenizer = ChatFormat(ByteTokenizer()), ByteTokenizer()
    ids = [tokenizer.merged, *b" apple", tokenizer.eos_token_id]
    first, ids, message = _sample(chat, [USER], ids)
    prompt = chat.prompt([USER, message, USER], [TOOL], "a")
    assert prompt.ids[: len(first.ids) + len(ids)] == (*first.ids, *ids)
    again = ChatFormat(tokenizer).prompt([USER, message, USER], [TOOL])
    assert again.text == prompt.text
    assert again.ids != prompt.ids


def test_interleaved_conversations_of_one_attempt_each_continue_their_own():
    chat, tokenizer = ChatFormat(ByteTokenizer()), ByteTokenizer()
    other = {"role": "user", "content": "And you?"}
    answer = [tokenizer.merged, *b"swer", tokenizer.eos_token_id]
    one, ids_one, message_one = _sample(chat, [USER], answer)
    two, ids_two, message_two = _sample(chat, [other], answer)
    assert chat.prompt([USER, message_one, USER], [TOOL], "a").ids[: len(one.ids) + 6] == (*one.ids, *ids_one)
    assert chat.prompt([other, message_two, USER], [TOOL], "a").ids[: len(two.ids) + 6] == (*two.ids, *ids_two)


def test_a_changed_call_is_rendered_as_changed():
    chat = ChatFormat(ByteTokenizer())
    _, _, message = _sample(chat, [USER], CALL)
    changed = {**message, "tool_calls": [_call(message["tool_calls"][0]["id"], '{"expression": "1+1"}')]}
    assert '"1+1"' in chat.prompt([USER, changed, _result("x")], [TOOL], "a").text


def test_another_attempts_tokens_are_never_used():
    chat, tokenizer = ChatFormat(ByteTokenizer()), ByteTokenizer()
    _, _, message = _sample(chat, [USER], [tokenizer.merged, tokenizer.eos_token_id])
    assert tokenizer.merged not in chat.prompt([USER, message, USER], [TOOL], "b").ids
    chat.forget("a")
    assert tokenizer.merged not in chat.prompt([USER, message, USER], [TOOL], "a").ids


def test_what_is_remembered_is_bounded():
    chat = ChatFormat(ByteTokenizer(), remembered_chars=20_000)
    for number in range(300):
        _sample(chat, [USER], "x" * 500, attempt=f"attempt {number}")
    for _ in range(300):
        _sample(chat, [USER], "x" * 500, attempt="long")
    assert chat._size <= 20_000 + 64 * 2000
    assert chat._size == sum(memory.size for memory in chat._memories.values())


def test_a_real_tokenizer_and_the_hermes_template_continue_token_for_token():
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab=_vocabulary(tokenizers), merges=[("a", "n"), ("1", "9")])
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|im_end|>"
    )
    tokenizer.chat_template = (files("lightning_trainer") / "templates" / "hermes.jinja").read_text()
    chat = ChatFormat(tokenizer)
    assert chat.takes_tools
    letters = tokenizer.convert_tokens_to_ids(list("19"))  # the tokenizer itself would give the one token "19"
    ids = [*tokenizer.encode('<tool_call>{"name":"calculator","arguments":{"expression":"', add_special_tokens=False)]
    ids += [*letters, *tokenizer.encode('"}}</tool_call>', add_special_tokens=False), tokenizer.eos_token_id]
    first, ids, message = _sample(chat, [USER], ids)
    prompt = chat.prompt([USER, message, _result(message["tool_calls"][0]["id"])], [TOOL], "a")
    assert prompt.ids[: len(first.ids) + len(ids)] == (*first.ids, *ids)
    assert tokenizer.decode(prompt.ids).endswith(
        "<tool_response>\n19\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def _vocabulary(tokenizers):
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    return {token: number for number, token in enumerate(["<|im_start|>", "<|im_end|>", *letters, "an", "19"])}


def _sample(chat, messages, answer, attempt="a"):
    """Render a prompt and remember an answer to it, as the gateway does; give prompt, ids and message."""
    tokenizer = chat._tokenizer
    prompt = chat.prompt(messages, [TOOL], attempt)
    ids = [*tokenizer.encode(answer), tokenizer.eos_token_id] if isinstance(answer, str) else list(answer)
    text = tokenizer.decode(ids, skip_special_tokens=True)
    message = parse(text).message()
    chat.remember(attempt, prompt, ids, text, message)
    return prompt, ids, message


def _call(call_id, arguments):
    return {"id": call_id, "type": "function", "function": {"name": "calculator", "arguments": arguments}}


def _result(call_id):
    return {"role": "tool", "tool_call_id": call_id, "content": "19"}
