"""A model that goes on and on, in blanks or in beginnings of calls, is read in a time that grows as its answer does.

No test here takes a time: where reading takes the square of the length, it does not end before the suite's timeout.
"""

# ruff: noqa: RUF001 - DeepSeek's own letters

from __future__ import annotations

import pytest

from lightning_trainer.gateway.formats.reader import Dialect, parse
from lightning_trainer.gateway.formats.table import by_name
from lightning_trainer.gateway.formats.unread import unread

SIZE = 400_000
TOOLS = [{"type": "function", "function": {"name": "search", "parameters": {"type": "object", "properties": {}}}}]
BLANKS = pytest.mark.parametrize("blank", [" ", "\n", "\n "], ids=["spaces", "lines", "both"])


@BLANKS
@pytest.mark.parametrize("said", ["I will search", "I will search:0", "I will search ```", "search(", "<a", "Action:"])
def test_a_tools_name_and_then_blanks_are_no_call(said, blank):
    assert unread(said + blank * (SIZE // len(blank)) + "x", TOOLS) is None


@BLANKS
@pytest.mark.parametrize(
    ("name", "begun", "calls"),
    [
        ("hermes", '<tool_call>{"name": "search", "arguments": {}}', 0),
        ("qwen-xml", "<tool_call>", 0),
        ("qwen-xml", "<tool_call><function=search>", 0),
        ("qwen-xml", "<tool_call><function=search></function>", 0),
        ("qwen-xml", "<tool_call><function=search><parameter=q>a</parameter>", 0),
        ("glm", "<tool_call>search", 0),
        ("glm", "<tool_call>search<arg_key>q</arg_key>", 0),
        ("glm", "<tool_call>search<arg_key>q</arg_key><arg_value>a</arg_value>", 0),
        ("mistral", "[TOOL_CALLS]search", 0),
        ("mistral", "[TOOL_CALLS]search[CALL_ID]a", 0),
        ("mistral", "[TOOL_CALLS]search[ARGS]", 0),
        ("deepseek-dsml", '<｜DSML｜tool_calls><｜DSML｜invoke name="search">', 0),
        ("kimi", "<|tool_calls_section_begin|><|tool_call_begin|>search:0", 0),
        ("minimax", '<minimax:tool_call><invoke name="search">', 0),
        ("gemma", "<|tool_call>call:search", 0),
        ("harmony", "<|channel|>commentary to=functions.search", 0),
        ("harmony", "<|channel|>commentary to=functions.search<|message|>{}<|call|>", 1),
        ("harmony", "<|channel|>commentary to=functions.search<|message|>{}<|call|><|start|>assistant", 1),
    ],
)
def test_blanks_in_a_call_or_after_it_are_read_once(name, begun, calls, blank):
    text = begun + blank * (SIZE // len(blank)) + "x"
    assert len(parse(Dialect(by_name(name)), text, TOOLS).tool_calls) == calls


@pytest.mark.parametrize(
    ("name", "before", "again", "after"),
    [
        ("qwen-xml", "", "<tool_call><function=search>", ""),
        ("qwen-xml", "<tool_call><function=search>", "<parameter=q>", "</function></tool_call>"),
        ("glm", "", "<tool_call>search<arg_key>", ""),
        ("glm", "<tool_call>search", "<arg_key>", "</tool_call>"),
        ("glm", "<tool_call>search", "<arg_key>q</arg_key><arg_value>", "</tool_call>"),
        ("deepseek-dsml", "<｜DSML｜tool_calls>", '<｜DSML｜invoke name="search">', ""),
        (
            "deepseek-dsml",
            '<｜DSML｜tool_calls><｜DSML｜invoke name="search">',
            '<｜DSML｜parameter name="q" string="true">',
            "</｜DSML｜invoke>",
        ),
        ("minimax", "<minimax:tool_call>", '<invoke name="search">', ""),
        ("minimax", '<minimax:tool_call><invoke name="search">', '<parameter name="q">', "</invoke>"),
    ],
)
def test_what_begins_again_and_again_and_never_ends_is_content(name, before, again, after):
    text = before + again * (6 * SIZE // len(again)) + after
    answer = parse(Dialect(by_name(name)), text, TOOLS)
    assert (answer.content, answer.tool_calls) == (text, ())
