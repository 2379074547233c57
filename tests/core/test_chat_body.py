"""What was asked and called, read from the bodies of every surface."""

from __future__ import annotations

import pytest

from lightning_spans.chat.body import ToolCall, messages_of, tool_call, tool_calls, tool_schemas

USER = {"role": "user", "content": "hi"}
PARAMETERS = {"type": "object"}


@pytest.mark.parametrize(
    ("request_", "messages"),
    [
        ({"messages": [USER]}, [USER]),
        ({"prompt": "hi"}, [USER]),
        ({"prompt": ["hi"]}, [USER]),
        ({"prompt": [[1, 2]]}, [1, 2]),
        ({"input": "hi", "instructions": "Be brief."}, [{"role": "system", "content": "Be brief."}, USER]),
        ({"input": [USER], "instructions": None}, [USER]),
        ({"messages": None}, None),
        ({"messages": 7}, None),
        ({}, None),
    ],
)
def test_messages_are_read_on_every_surface(request_, messages):
    assert messages_of(request_) == messages


def test_tools_are_read_on_every_surface():
    chat = {"type": "function", "function": {"name": "a", "parameters": PARAMETERS}}
    responses = {"type": "function", "name": "b", "parameters": PARAMETERS}
    anthropic = {"name": "c", "input_schema": PARAMETERS}
    odd = [{"name": "d"}, {"type": "web_search"}, {"function": None}, 7, {"function": {"name": 3}}]
    found = tool_schemas({"tools": [chat, responses, anthropic, *odd]})
    assert found == {"a": PARAMETERS, "b": PARAMETERS, "c": PARAMETERS, "d": {}}
    assert tool_schemas({"tools": "none"}) == tool_schemas({}) == {}


@pytest.mark.parametrize(
    "message",
    [
        {"tool_calls": [tool_call("1", "add", '{"x": 1}'), {"id": "2", "function": None}, 7]},
        {"output": [{}, {"type": "function_call", "call_id": "1", "name": "add", "arguments": '{"x": 1}'}]},
        {"content": [{"type": "text"}, {"type": "tool_use", "id": "1", "name": "add", "input": {"x": 1}}]},
    ],
)  # fmt: skip
def test_calls_of_tools_are_read_on_every_surface(message):
    (call,) = tool_calls(message)
    assert (call.name, call.parsed, call.call_id) == ("add", {"x": 1}, "1")


def test_the_order_of_names_does_not_make_another_call():
    assert ToolCall("f", '{"a": 1, "b": 2}', "1").signature == ToolCall("f", {"b": 2, "a": 1}, None).signature
    assert ToolCall("f", "{", None).signature != ToolCall("f", "[", None).signature
    with pytest.raises(ValueError, match="property name"):
        ToolCall("f", "{", None).parsed  # noqa: B018
