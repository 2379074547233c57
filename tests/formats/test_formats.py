"""Tool calls and reasoning of every format, as the families' own templates write them: whole, cut anywhere, broken."""

# ruff: noqa: RUF001 - DeepSeek's own letters

from __future__ import annotations

import copy
import functools
import itertools
import json
import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_trainer.gateway.formats.reader import AnswerReader, Dialect, parse
from lightning_trainer.gateway.formats.table import FORMATS, by_name
from lightning_trainer.gateway.http.errors import Refusal
from lightning_trainer.gateway.prompt.marked_text import MarkedText
from lightning_trainer.gateway.prompt.template import ChatFormat
from support.models.model_families import Family, all_families, tokenizer_of

pytest.importorskip("transformers")

FAMILIES = {family.name: family for family in all_families()}
READ = [name for name, family in FAMILIES.items() if family.format]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Does it.",
            "parameters": {
                "type": "object",
                "properties": {
                    "count": {"type": "integer", "description": "How many."},
                    "note": {"type": "string", "description": "A text."},
                    "deep": {"type": "object", "description": "More.", "properties": {}},
                    "many": {"type": "array", "description": "Several.", "items": {"type": "integer"}},
                    "sure": {"type": "boolean", "description": "Whether."},
                },
                "required": ["count"],
            },
        },
    }
    for name in ("add", "look_up")
]
DEFINED = {"Color": {"type": "string", "enum": ["red", "7"]}, "Loop": {"$ref": "#/$defs/Loop"}}
USER = {"role": "user", "content": "What is 12+7?"}
SIMPLE = [("add", {"count": 2, "note": "7"})]
SEVERAL = [
    ("add", {"count": -3, "note": "größe 北京 🙂 it's", "deep": {"a": [1, {"b": "x"}], "ü": None}, "sure": True}),
    ("look_up", {"count": 0, "many": [1, 2, 3]}),
]


@functools.cache
def chat_of(name: str) -> ChatFormat:
    return ChatFormat(tokenizer_of(FAMILIES[name]))


def written(family: Family, calls: list, reasoning: str | None = None) -> tuple[str, str, list[int]]:
    """Return a prompt, the answer as the family's template writes it, and the answer's tokens."""
    chat = chat_of(family.name)
    ids = [
        f"functions.{name}:{at}" if family.format == "kimi" else f"callnum{at:02}" for at, (name, _) in enumerate(calls)
    ]
    message = {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
            for call_id, (name, arguments) in zip(ids, calls, strict=True)
        ],
    }
    if reasoning:
        message["reasoning_content"] = reasoning
    tools = TOOLS if chat.takes_tools else []
    prompt = chat.plain.shown(chat.render([USER], tools))
    shown = [chat._for_template(each) for each in (USER, message)]
    whole = chat._template(shown, tools, prompt=False)
    tokens = zip(chat.encode(prompt), chat.encode(whole), strict=False)
    same = len(chat.decode([a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], tokens)]))
    answer = whole[same:].rstrip("\n")
    for end in (family.end, *family.ends):
        if end not in {"<|call|>", "<|tool_response>"}:
            answer = answer.removesuffix(end)
    answer = answer.removesuffix("<|tool_response>")
    return prompt[:same], answer, chat.encode(answer)


def read_calls(answer) -> list:
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in answer.tool_calls]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_format_is_found_by_the_template_alone(name):
    family, chat = FAMILIES[name], chat_of(name)
    assert (chat.calls.name if chat.calls else None) == family.format
    assert (chat.dialect.thinking.open if chat.dialect.thinking else None) == family.thinking


@pytest.mark.parametrize("calls", [SIMPLE, SEVERAL], ids=["one", "several"])
@pytest.mark.parametrize("name", READ)
def test_calls_are_read_as_the_template_writes_them(name, calls):
    family, chat, calls = FAMILIES[name], chat_of(name), copy.deepcopy(calls)
    if name in ("Llama 3.1", "Llama 3.2") and len(calls) > 1:
        pytest.skip("its template allows one call")
    if name == "gpt-oss" and len(calls) > 1:
        calls = calls[:1]  # its template writes the first
    if name == "LFM2.5" and len(calls) > 1:
        calls[0][1]["note"] = calls[0][1]["note"].replace("'", "")  # which its template writes without escaping it
    prompt, _, ids = written(family, calls)
    answer = chat.read(ids, TOOLS, opened=chat.opened(prompt))
    assert read_calls(answer) == calls
    assert answer.content is None
    assert len({call["id"] for call in answer.tool_calls}) == len(calls)


@pytest.mark.parametrize("name", [name for name in READ if FAMILIES[name].thinking])
def test_reasoning_before_a_call_is_read(name):
    family, chat = FAMILIES[name], chat_of(name)
    prompt, text, ids = written(family, SIMPLE, reasoning="I should\nadd.")
    if "should" not in text:
        pytest.skip("its template leaves reasoning out of answers")
    answer = chat.read(ids, TOOLS, opened=chat.opened(prompt))
    assert (answer.reasoning, answer.content, read_calls(answer)) == ("I should\nadd.", None, SIMPLE)


@pytest.mark.parametrize("name", READ)
def test_each_cut_gives_what_the_whole_does(name):
    family, chat = FAMILIES[name], chat_of(name)
    prompt, text, ids = written(family, SIMPLE if name == "gpt-oss" else SEVERAL[:1], reasoning="Hm, add.")
    opened = chat.opened(prompt)
    whole = chat.read(ids, TOOLS, opened=opened)
    dialect = Dialect(chat.calls, chat.dialect.thinking)
    for cut in range(len(text) + 1):
        assert streamed(dialect, [text[:cut], text[cut:]], opened) == shape(whole), cut
    assert streamed(dialect, list(text), opened) == shape(whole)
    marked = MarkedText(chat._tokenizer, chat.dialect.kept)
    reader = chat.reader(TOOLS, opened=opened)  # token by token
    sent = [reader.feed(marked.push([token])) for token in ids]
    sent.append(reader.feed(marked.finish()))
    assert joined(reader, sent) == shape(whole)


def shape(answer) -> tuple:
    return answer.reasoning, answer.content, read_calls(answer)


def streamed(dialect: Dialect, pieces: list[str], opened: bool) -> tuple:
    reader = AnswerReader(dialect, TOOLS, opened=opened)
    return joined(reader, [reader.feed(piece) for piece in pieces])


def joined(reader: AnswerReader, sent: list[tuple[str, str]]) -> tuple:
    """End an answer; what was sent piece by piece must be what the message says."""
    rest, answer = reader.close()
    reasoning, content = ("".join(parts) for parts in zip(*sent, rest, strict=True))
    assert (reasoning or None, content) == (answer.reasoning, answer.content or "")
    return shape(answer)


@pytest.mark.parametrize("name", READ)
def test_a_fault_makes_it_content_exactly_as_sampled(name):
    chat, rng = chat_of(name), random.Random(0)
    prompt, text, _ = written(FAMILIES[name], SIMPLE)
    dialect, opened = Dialect(chat.calls, chat.dialect.thinking), chat.opened(prompt)
    plain = parse(dialect, text, TOOLS, opened=opened)
    assert read_calls(plain) == SIMPLE
    faults = 0
    for _ in range(60):
        at = rng.randrange(len(text))
        broken = text[:at] + rng.choice(["", "\x00", ",,", '"', "}"]) + text[at + 1 :]
        answer = parse(dialect, broken, TOOLS, opened=opened)
        if not answer.tool_calls and not answer.reasoning and "harmony" not in str(FAMILIES[name].format):
            faults += 1
            assert answer.content is not None
            assert broken.endswith(answer.content.lstrip())
            before = broken.strip().removesuffix(answer.content.strip())
            thinking = chat.dialect.thinking
            marks = {thinking.close, thinking.open + thinking.close} if thinking else set()
            assert "".join(before.split()) in {"", *marks}
    assert faults > 3 or FAMILIES[name].format == "harmony" or opened


_PIECES = [
    "<tool_call>", "</tool_call>", "<function=add>", "<parameter=count>\n2\n</parameter>", "</function>", "<think>",
    "</think>", "\n", " ", "abc", "é", '{"name": "add", "arguments": {"count": 2}}', "<", "[TOOL_CALLS]", "add",
    "[ARGS]", "[", "]", "{", "}", '{"count": 1}', "<|channel|>", "analysis", "final", "<|message|>", "<|end|>",
    "<|start|>", "assistant", " to=functions.", "commentary", "<|call|>", "<arg_key>count</arg_key>",
    "<arg_value>2</arg_value>", "<|tool_call>", "call:add", "<tool_call|>", "<minimax:tool_call>",
    '<invoke name="add">',
    "</invoke>", "</minimax:tool_call>", "add(count=1)", '{"name": "add", "parameters": {"count": 1}}', "; ",
]  # fmt: skip


@settings(max_examples=300)
@given(
    name=st.sampled_from(READ),
    parts=st.lists(st.sampled_from(_PIECES), max_size=14),
    cuts=st.lists(st.integers(0, 300), max_size=8),
    opened=st.booleans(),
)
def test_any_text_cut_anywhere_is_read_as_the_whole_and_nothing_is_lost(name, parts, cuts, opened):
    chat, text = chat_of(name), "".join(parts)
    dialect = Dialect(chat.calls, chat.dialect.thinking)
    whole = parse(dialect, text, TOOLS, opened=opened)
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    assert streamed(dialect, [text[a:b] for a, b in pairwise(places)], opened) == shape(whole)
    if not whole.tool_calls and chat.calls is not None and not chat.calls.anywhere:
        kept = (whole.reasoning or "") + (whole.content or "")
        marks = dialect.thinking and (dialect.thinking.open, dialect.thinking.close)
        for mark in marks or ():
            text, kept = text.replace(mark, ""), kept.replace(mark, "")
        assert "".join(text.split()) == "".join(kept.split())


def test_without_tools_no_call_is_looked_for():
    dialect = Dialect(by_name("hermes"))
    text = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    assert parse(dialect, text).content == text
    assert not parse(dialect, text).tool_calls


HERMES_CALL = '<tool_call>\n{"name": "add", "arguments": {"count": 1}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "calls"),
    [
        (f"<think>\nI'd write {HERMES_CALL} but no.\n</think>\n\n19", f"I'd write {HERMES_CALL} but no.", "19", 0),
        (f"<think>\nI call it.\n{HERMES_CALL}", "I call it.", None, 1),  # the call ends reasoning that is never closed
        (f"<think>\nI call it.\n{HERMES_CALL} or not", f"I call it.\n{HERMES_CALL} or not", "", 0),
        (f"<think>\nhm\n</think>\n\n{HERMES_CALL}", "hm", None, 1),
        ("<think>\nnever said", "never said", "", 0),
        ("no <think>at all</think>", None, "no <think>at all</think>", 0),
        ("<think>\n\n</think>\n\n19", None, "19", 0),
    ],
)
def test_a_call_inside_reasoning_counts_only_where_the_reasoning_never_ends(text, reasoning, content, calls):
    chat = chat_of("Qwen3")
    answer = chat.parse(text, TOOLS)
    assert (answer.reasoning, answer.content, len(answer.tool_calls)) == (reasoning, content, calls)


def test_a_mark_that_is_a_control_token_is_no_mark_where_letters_spell_it():
    chat = chat_of("Mistral v3")
    call = '[TOOL_CALLS] [{"name": "add", "arguments": {"count": 1}}]'
    spelled = [token for letter in call for token in chat.encode(letter)]
    assert chat.read(chat.encode(call), TOOLS).tool_calls
    answer = chat.read(spelled, TOOLS)
    assert (answer.content, answer.tool_calls) == (call, ())


@pytest.mark.parametrize(
    ("schema", "raw", "value"),
    [
        ({"type": "string"}, "7", "7"),
        ({"type": "string"}, "true", "true"),
        ({"type": "integer"}, "7", 7),
        ({"type": "integer"}, "seven", "seven"),
        ({"type": "number"}, "1.5", 1.5),
        ({"type": "boolean"}, "True", True),
        ({"type": ["string", "null"]}, "null", None),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "x", "x"),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "7", 7),
        ({"type": "string", "enum": ["1"]}, "1", "1"),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"type": "array"}, "[1, 2]", [1, 2]),
        ({"type": "object"}, '{"a": "b"}', {"a": "b"}),
        ({}, "7", 7),
        ({}, "plain", "plain"),
        ({"const": "7"}, "7", "7"),
        ({"$ref": "#/$defs/Color"}, "7", "7"),
        ({"allOf": [{"$ref": "#/$defs/Color"}]}, "7", "7"),
        ({"anyOf": [{"$ref": "#/$defs/Color"}, {"type": "null"}]}, "7", "7"),
        ({"anyOf": [{"$ref": "#/$defs/Color"}, {"type": "null"}]}, "null", None),
        ({"anyOf": [{"type": "string", "enum": ["none", "asc"]}, {"type": "null"}]}, "none", "none"),
        ({"anyOf": [{"type": "string", "enum": ["none", "asc"]}, {"type": "null"}]}, "null", None),
        ({"type": ["string", "null"], "enum": ["none", None]}, "none", "none"),
        ({"anyOf": [{"const": "none"}, {"type": "null"}]}, "none", "none"),
        ({"$ref": "#/$defs/Loop"}, "7", 7),
        ({"$ref": "#/$defs/nowhere"}, "7", 7),
    ],
)
@pytest.mark.parametrize("name", ["Qwen3.5", "GLM-4.5", "MiniMax M2"])
def test_plain_text_is_typed_by_the_tools_schema(name, schema, raw, value):
    tool = {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": {"x": schema}, "$defs": DEFINED}},
    }
    text = {
        "Qwen3.5": f"<tool_call>\n<function=f>\n<parameter=x>\n{raw}\n</parameter>\n</function>\n</tool_call>",
        "GLM-4.5": f"<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>{raw}</arg_value>\n</tool_call>",
        "MiniMax M2": f'<minimax:tool_call>\n<invoke name="f">\n<parameter name="x">{raw}</parameter>\n</invoke>\n'
        "</minimax:tool_call>",
    }[name]
    (call,) = parse(Dialect(chat_of(name).calls), text, [tool]).tool_calls
    assert json.loads(call["function"]["arguments"]) == {"x": value}


@pytest.mark.parametrize("value", ["\nabc", "abc\n", "a\n\nb", " a ", "\n"])
def test_line_breaks_of_a_value_that_stands_inline_are_its_own(value):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {"type": "string"}}}}}
    written = f'<invoke name="f">\n<parameter name="x">{value}</parameter>\n</invoke>'
    text = f"<minimax:tool_call>\n{written}\n</minimax:tool_call>"
    (call,) = parse(Dialect(by_name("minimax")), text, [tool]).tool_calls
    assert json.loads(call["function"]["arguments"]) == {"x": value}


@pytest.mark.parametrize("format_name", [each.name for each in FORMATS])
def test_no_text_makes_a_reader_raise_or_hang(format_name):
    dialect = Dialect(by_name(format_name))
    for mark in by_name(format_name).marks:
        for body in ("", "[" * 50_000, "{" * 50_000, "(" * 5_000, '"' * 100, "\x00", "<" * 10_000, "{}" * 1000):
            assert parse(dialect, mark + body, TOOLS).content is not None


def test_tools_are_refused_where_no_call_would_be_read():
    chat = chat_of("unknown")
    assert chat.takes_tools
    with pytest.raises(Refusal, match=r"in an unsupported form.*--tool-format"):
        chat.render([USER], TOOLS)
    assert chat.render([USER], [])


def test_a_format_can_be_named_where_the_template_hides_it():
    family = FAMILIES["unknown"]
    chat = ChatFormat(tokenizer_of(family), "deepseek-v3")
    assert chat.render([USER], TOOLS)
    call = 'function<｜tool▁sep｜>add\n```json\n{"count": 2}\n```<｜tool▁call▁end｜>'
    text = f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{call}"
    assert read_calls(chat.parse(text, TOOLS)) == [("add", {"count": 2})]
    with pytest.raises(Refusal, match="'none' was chosen"):
        ChatFormat(tokenizer_of(family), "none").render([USER], TOOLS)
