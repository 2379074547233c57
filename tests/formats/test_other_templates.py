"""Chat templates that nobody has seen: their format is found, or refused, and never wrong in silence."""

from __future__ import annotations

import json
import re

import pytest

from lightning_spans.errors import ConfigError
from lightning_trainer.gateway.formats.unread import unread
from lightning_trainer.gateway.http.errors import Refusal
from lightning_trainer.gateway.prompt.continuation import Continuations
from lightning_trainer.gateway.prompt.doctor import examine_template
from lightning_trainer.gateway.prompt.template import ChatFormat, check_calls
from lightning_trainer.reasons.continuation import OTHER, ContinuationReason
from support.models import families

pytest.importorskip("transformers")
USER = {"role": "user", "content": "What is 12+7?"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA}}
DATA = "({'name': c.function.name, 'arguments': c.function.arguments} | tojson)"
HERMES = "{{ '<tool_call>\n' + " + DATA + " + '\n</tool_call>' }}"


def chat_of(call=HERMES, *, text="m.content or ''", before="", end="", skipped="'nobody'"):
    """A chat format whose template writes calls and texts in its own way."""
    template = (
        "{% for t in tools or [] %}{{ '# ' + (t | tojson) + '\n' }}{% endfor %}"
        "{% for m in messages if m.role != " + skipped + " %}" + before + "{{ '<|im_start|>' + m.role + '\n' }}"
        "{{ " + text + " }}{% for c in m.tool_calls or [] %}" + call + "{% endfor %}" + end + "{{ '<|im_end|>\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    return families.tokenizer_with(template, families._CHATML_TOKENS, "<|im_end|>")


@pytest.mark.parametrize(
    "call",
    [
        "{{ '<functioncall> ' + " + DATA + " }}",
        "{{ 'Action: [' + c.function.name + '(a=1, b=\"7\")]' }}",
        "{{ '<calls>\n<tool_call>' + " + DATA + " + '</tool_call>\n</calls>' }}",
        "{{ '```json\n' + " + DATA + " + '\n```' }}",
        '{{ \'<call name="\' + c.function.name + \'" a="1" b="7"/>\' }}',
    ],
    ids=["word before JSON", "word before Python", "tag around it", "fenced", "attributes"],
)
def test_a_form_that_only_holds_one_that_is_read_is_not_taken_for_it(call):
    tokenizer = chat_of(call)
    with pytest.raises(ConfigError, match="in an unsupported form"):
        check_calls(tokenizer, None)
    report = examine_template(tokenizer)
    assert (report.tool_format, report.tools) == (None, "refused: calls are written in an unsupported form")


@pytest.mark.parametrize("lead", ["", "<think>\n\n</think>\n\n", "\n"])
def test_empty_reasoning_before_a_call_hides_no_format(lead):
    text = f"(({lead!r} if m.role == 'assistant' else '') + (m.content or ''))"
    assert ChatFormat(chat_of(text=text)).calls.name == "hermes"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"skipped": "'tool'"}, "does not show the results of tools"),
        ({"before": "{% if m.role == 'tool' %}{{ raise_exception('no role tool') }}{% endif %}"}, "no role tool"),
    ],
    ids=["left out", "refused"],
)
def test_a_template_that_shows_no_results_of_tools_is_refused_before_the_first_rollout(options, says):
    tokenizer = chat_of(**options)
    with pytest.raises(ConfigError, match=f"never see the results of tools: .*{says}"):
        check_calls(tokenizer, None)
    check_calls(tokenizer, "none")  # agents without tools
    with pytest.raises(Refusal, match=says):
        ChatFormat(tokenizer).render([USER], [TOOL])
    assert examine_template(tokenizer).tools == "refused: the chat template shows no results of tools"


def test_reasoning_between_marks_of_any_letters_is_found():
    shown = "('◁think▷' + m.reasoning_content + '◁/think▷' if m.reasoning_content else '') + (m.content or '')"
    chat = ChatFormat(chat_of(text=shown))
    answer = chat.parse("◁think▷hm\n◁/think▷\n\n19", [])
    assert (answer.reasoning, answer.content) == ("hm", "19")
    assert examine_template(chat._tokenizer).continuation["reasoning"] == "exact"


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ("{% if m.tool_calls | length > 1 %}{{ raise_exception('one') }}{% endif %}" + HERMES, "refused: .*one call"),
        ("{% if loop.first %}" + HERMES + "{% endif %}", "not shown: .*one of them"),
        (HERMES, "exact"),
    ],
)
def test_the_doctor_says_what_becomes_of_several_calls(call, says):
    report = examine_template(chat_of(call))
    assert report.continuation["tool call"] == "exact"
    assert report.rows["tool call"] == 1
    assert re.match(says, report.continuation["two tool calls"])


def test_a_template_that_trims_answers_does_not_break_the_row():
    chat = ChatFormat(chat_of(text="(m.content or '') | trim"))
    continuations = Continuations(chat)
    first = continuations.prompt([USER], [], "a")
    ids = [*chat.encode(" 19 \n"), chat.end_token]
    message = chat.read(ids, []).message()
    continuations.remember("a", first, ids, message)
    second = continuations.prompt([USER, message, USER], [], "a")
    assert second.how == ContinuationReason.JOINED
    assert second.ids[: len(first.ids) + len(ids)] == (*first.ids, *ids)


def test_a_template_that_changes_an_answers_words_begins_a_row():
    chat = ChatFormat(chat_of(text="(m.content or '') | replace('nine', 'ten')"))
    continuations = Continuations(chat)
    first = continuations.prompt([USER], [], "a")
    ids = [*chat.encode("nine"), chat.end_token]
    message = chat.read(ids, []).message()
    continuations.remember("a", first, ids, message)
    assert continuations.prompt([USER, message, USER], [], "a").how == ContinuationReason.REWRITTEN


@pytest.mark.parametrize(
    "text",
    [
        'Sure! {"name": "add", "parameters": {"a": 1}}',
        '```json\n{"name": "add", "arguments": {"a": 1}}\n```',
        '{"type": "function", "function": {"name": "add", "arguments": "{}"}}',
        '{"tool": "add", "args": {"a": 1}}',
        "<function=add>\n<parameter=a>\n1\n</parameter>\n</function>",
        '<invoke name="add"><parameter name="a">1</parameter></invoke>',
        '<call name="add" a="1"/>',
        "```tool_code\nadd(a=1)\n```",
        "<|python_tag|>add.call(a=1)",
        'to=functions.add json {"a": 1}',
        'functions.add:0 {"a": 1}',
        "call:add{a:1}",
        'functionadd\n```json\n{"a": 1}\n```',
        "add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>",
        'Action: add\nAction Input: {"a": 1}',
    ],
)
def test_an_answer_that_names_a_tool_with_arguments_is_counted(text):
    assert unread(text, [TOOL]) == OTHER


@pytest.mark.parametrize(
    "text",
    ["I would use the add function.", 'Write {"name": "x"}.', "Let me add(it) up.", '{"name": "Ada", "args": 1}', "add",
     json.dumps({"name": "add", "age": 3}), "{" * 5000, "<add>"],
)  # fmt: skip
def test_an_answer_that_only_speaks_of_a_tool_is_not(text):
    assert unread(text, [TOOL]) is None
