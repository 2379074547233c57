"""A call that is forced: whatever the grammar of a format allows is read as a call that fits its schema."""

from __future__ import annotations

import copy
import functools
import json
import random

import pytest

from support.fakes import FakeEngine
from support.models.model_families import all_families, tokenizer_of

pytest.importorskip("torch")
pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")

from lightning_trainer.backends.torch.generate.grammar import Grammar, Grammars
from lightning_trainer.gateway.calls.answers import Responder
from lightning_trainer.gateway.formats.frames import HERMES, NINE_LETTERS
from lightning_trainer.gateway.http.errors import Refusal
from lightning_trainer.gateway.prompt.template import ChatFormat
from lightning_trainer.gateway.request.chat_request import read_chat_request
from lightning_trainer.gateway.request.constraints import constraint_of

FAMILIES = {family.name: family for family in all_families()}
FORCED = [name for name, family in FAMILIES.items() if family.format and name != "DeepSeek V3"]  # it takes no tools
SAYS_END = {  # ends of plain texts, which no text may hold
    "Qwen3.5": "</function>", "GLM-4.5": "</tool_call>", "MiniMax M2": "</invoke>", "Gemma 4": '<|"|>',
    "DeepSeek V3.2": "</｜DSML｜parameter>",  # noqa: RUF001 - DeepSeek's own letters
}  # fmt: skip


def tool(name: str, *, required: tuple[str, ...] = (), **properties: object) -> dict:
    parameters = {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": "Does it.", "parameters": parameters}}


SHORT = {"type": "string", "maxLength": 5}
TOOLS = [
    tool(
        "look_up",
        required=("count", "color"),
        word=SHORT,
        count={"type": "integer", "minimum": -3, "maximum": 40},
        color={"enum": ["red", "größe </b>", "7"]},
        note={"anyOf": [{"type": "string", "minLength": 2, "maxLength": 4}, {"type": "null"}]},
        sure={"type": "boolean"},
        many={"type": "array", "items": SHORT, "maxItems": 2},
    ),
    tool("leave"),
]
DEEP = tool("go_deep", required=("deep",), deep={"$ref": "#/$defs/Deep"})
DEEP["function"]["parameters"]["$defs"] = {
    "Deep": {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}, "b": SHORT},
        "required": ["a"],
        "additionalProperties": False,
    }
}


@functools.cache
def chat_of(name: str) -> ChatFormat:
    return ChatFormat(tokenizer_of(FAMILIES[name]))


@functools.cache
def grammars_of(name: str) -> Grammars:
    tokenizer, family = tokenizer_of(FAMILIES[name]), FAMILIES[name]
    ends = {tokenizer.convert_tokens_to_ids(end) for end in (family.end, *family.ends)}
    return Grammars(tokenizer, len(tokenizer), ends)


def grammar_of(name: str, tools: list, choice: object = "required", *, one_call: bool = False) -> Grammar:
    constraint = constraint_of(choice, tools, None, one_call=one_call)
    return grammars_of(name).make(constraint.lark(chat_of(name).frame))


def drawn(name: str, grammar: Grammar, rng: random.Random) -> list[int]:
    """Draw any token that is allowed, until one ends the answer."""
    found, width = [], len(chat_of(name)._tokenizer)
    ends = set(grammar._end_tokens)
    for _ in range(4000):
        allowed = grammar.allowed(width).nonzero()[0].tolist()
        assert grammar.failure is None
        token = rng.choice(allowed)
        grammar.take(token)
        found.append(token)
        if token in ends:
            return found
    raise AssertionError(chat_of(name).decode(found))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", FORCED)
def test_whatever_is_allowed_is_read_as_calls_that_fit_their_schemas(name, seed):
    chat = chat_of(name)
    tools = TOOLS if FAMILIES[name].format == "gemma" else [*TOOLS, DEEP]
    ids = drawn(name, grammar_of(name, tools), random.Random(seed))
    answer = chat.read(ids, tools)
    assert answer.tool_calls, chat.decode(ids)
    assert not answer.content
    schemas = {each["function"]["name"]: each["function"]["parameters"] for each in tools}
    for call in answer.tool_calls:
        jsonschema.validate(json.loads(call["function"]["arguments"]), schemas[call["function"]["name"]])
    assert len(answer.tool_calls) == 1 or chat.frame.between is not None


@pytest.mark.parametrize("name", FORCED)
def test_the_tool_that_is_named_is_called_once(name):
    choice = {"type": "function", "function": {"name": "leave"}}
    ids = drawn(name, grammar_of(name, TOOLS, choice, one_call=True), random.Random(1))
    (call,) = chat_of(name).read(ids, TOOLS).tool_calls
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("leave", {})


@pytest.mark.parametrize("name", FORCED)
def test_what_the_template_writes_is_allowed(name):
    """Free texts too, and letters, marks and numbers as the model has seen them."""
    chat, free = chat_of(name), {"type": "string"}
    tools = [tool("add", required=("a",), a={"type": "integer"}, b=free, c={"type": "array", "items": free})]
    arguments = {"a": -17, "b": "größe 北京 < 🙂 it is\n\n</b> x", "c": ["x", 'q"']}
    calls = [{"name": "add", "arguments": arguments}, {"name": "add", "arguments": {"a": 0}}]
    if name in ("Gemma 4", "LFM2.5", "Llama pythonic"):
        pytest.skip("its template does not write lists and letters as JSON does")
    text = shown(chat, calls if chat.frame.between is not None else calls[:1], tools)
    grammar = grammar_of(name, tools)
    for token in chat.encode(text):
        assert grammar.allowed(len(chat._tokenizer))[token], (text, chat.decode([token]))
        grammar.take(token)
    assert grammar.allowed(len(chat._tokenizer))[chat.end_token]


def shown(chat: ChatFormat, calls: list, tools: list) -> str:
    """Return calls as the template writes them, from the first mark to the last."""
    listed = [
        {
            "id": f"functions.add:{at}",
            "type": "function",
            "function": {**call, "arguments": json.dumps(call["arguments"])},
        }
        for at, call in enumerate(copy.deepcopy(calls))
    ]
    user = {"role": "user", "content": "hi"}
    messages = [chat._for_template(each) for each in (user, {"role": "assistant", "content": "", "tool_calls": listed})]
    whole = chat._template(messages, tools, prompt=False)
    begin = whole.rindex(chat.frame.begin)
    end = chat.frame.end.rpartition(NINE_LETTERS)[2]
    return whole[begin : whole.rindex(end) + len(end)] if end else whole[begin : whole.rindex(chat.usual_end)]


@pytest.mark.parametrize("name", SAYS_END)
def test_no_free_text_spells_what_ends_it(name):
    if name not in FAMILIES:
        pytest.skip("trl's templates are not here")
    chat = chat_of(name)
    grammar = grammar_of(name, [tool("add", required=("b",), b={"type": "string"})])
    frame, pairs, letters = chat.frame, chat.frame.pairs, SAYS_END[name]
    begun = f"{frame.begin}add{pairs.first}b{pairs.key_of_text}"
    spelled = [token for letter in f"x{letters}" for token in chat.encode(letter)]
    allowed = []
    for token in (*chat.encode(begun), *spelled):
        allowed.append(bool(grammar.allowed(len(chat._tokenizer))[token]))
        if not allowed[-1]:
            break
        grammar.take(token)
    assert allowed.pop() is False
    assert all(allowed)
    assert len(allowed) > len(chat.encode(begun))


def test_a_frame_of_hermes_is_what_templates_write():
    for name, family in FAMILIES.items():
        if family.format == "hermes":
            frame = chat_of(name).frame
            assert (frame.begin, frame.middle, frame.between, frame.end) == (
                HERMES.begin, HERMES.middle, HERMES.between, HERMES.end,
            )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "tools", "says"),
    [
        (
            "Qwen3.5",
            [tool("f", x={"type": "string", "pattern": "a+"})],
            "qwen-xml: there are further rules for the text x",
        ),
        (
            "Qwen3.5",
            [tool("f", x={"anyOf": [{"type": "integer"}, {"type": "string"}]})],
            "qwen-xml: the parameter x may",
        ),
        ("Qwen3.5", [tool("f", x={"enum": ["</function>"]})], "qwen-xml: a value of the parameter x"),
        ("GLM-4.5", [tool("f g")], "glm: the name 'f g' can't be written"),
        ("Gemma 4", [tool("f", x={"type": "object"})], "gemma: the parameter x may contain an object"),
        ("Llama pythonic", [tool("f", **{"from": {"type": "integer"}})], "pythonic: the name 'from' can't be written"),
        ("Kimi K2", [tool("f g")], "kimi: the name 'f g' can't be written"),
        ("MiniMax M2", [tool("f", required=("y",))], "minimax: f requires y"),
    ],
)
def test_what_a_format_can_not_be_held_to_is_refused_by_its_name(name, tools, says):
    if name not in FAMILIES:
        pytest.skip("trl's templates are not here")
    answers = Responder(FakeEngine(tokenizer=tokenizer_of(FAMILIES[name])).tokenizer)
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "tools": tools, "tool_choice": "required"}
    with pytest.raises(Refusal, match=f"can't be forced in the model's tool format, {says}"):
        answers.constrained(read_chat_request(body))


@pytest.mark.parametrize("name", ["Llama 3.1", "Magistral", "Qwen3"])
def test_an_answer_is_json_or_a_call_where_both_are_asked_for(name):
    if name not in FAMILIES:
        pytest.skip("trl's templates are not here")
    shape = {"type": "json_schema", "json_schema": {"name": "x", "schema": DEEP["function"]["parameters"]}}
    constraint = constraint_of("auto", TOOLS, shape, one_call=True)
    if name == "Llama 3.1":
        with pytest.raises(ValueError, match="start with the same text"):
            constraint.lark(chat_of(name).frame)
        return
    found = set()
    for seed in range(12):
        grammar = grammars_of(name).make(constraint.lark(chat_of(name).frame))
        answer = chat_of(name).read(drawn(name, grammar, random.Random(seed)), TOOLS)
        found.add(bool(answer.tool_calls))
        if not answer.tool_calls:
            jsonschema.validate(json.loads(answer.content), DEEP["function"]["parameters"])
    assert found == {True, False}


def test_a_format_that_the_template_does_not_write_is_refused_by_its_name():
    answers = Responder(tokenizer_of(FAMILIES["unknown"]), "deepseek-v3")
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, "tool_choice": "required"}
    with pytest.raises(Refusal, match="deepseek-v3: the chat template does not show how to write it"):
        answers.constrained(read_chat_request(body))
