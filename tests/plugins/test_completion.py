"""The parts of which plugins compose the bodies of chat completions."""

from __future__ import annotations

import pytest
from openai.types.chat import ChatCompletion

from lightning_openai.attributes import response_attributes
from lightning_openai.completion import (
    assistant_message,
    chat_completion,
    chat_request,
    finish_reason,
    function_tool,
    token_usage,
    tool_call,
    tool_message,
)
from lightning_spans.chat.body import tool_calls, tool_schemas
from lightning_spans.schema import spans as names

CALL = tool_call("c1", "add", '{"a": 1}')


def test_an_answer_is_a_chat_completion_that_openai_reads():
    message = assistant_message(None, [CALL])
    body = chat_completion((message, finish_reason(message)), id="x", model="m", usage=token_usage(3, 4))
    read = ChatCompletion.model_validate({**body, "created": 0, "usage": {**body["usage"], "total_tokens": 7}})
    (choice,) = read.choices
    assert (choice.index, choice.finish_reason, choice.message.content) == (0, "tool_calls", None)
    assert choice.message.tool_calls[0].function.arguments == '{"a": 1}'
    assert [(call.name, call.call_id) for call in tool_calls(message)] == [("add", "c1")]
    facts = response_attributes("/chat/completions", body)
    assert (facts[names.INPUT_TOKENS], facts[names.OUTPUT_TOKENS]) == (3, 4)
    assert (facts[names.RESPONSE_ID], facts[names.RESPONSE_MODEL]) == ("x", "m")
    assert facts[names.FINISH_REASONS] == ["tool_calls"]


def test_choices_are_numbered_in_their_order():
    body = chat_completion((assistant_message("a"), "stop"), (assistant_message("b"), "length"))
    assert [(each["index"], each["message"]["content"], each["finish_reason"]) for each in body["choices"]] == [
        (0, "a", "stop"),
        (1, "b", "length"),
    ]


def test_a_request_has_tools_only_if_there_are_some():
    asked = chat_request("m", iter([{"role": "user", "content": "hi"}, tool_message("c1", "2")]))
    assert asked == {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}, {"role": "tool", "tool_call_id": "c1", "content": "2"}],
    }
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    offered = chat_request("m", (), [function_tool("add", "Add.", schema)])
    assert tool_schemas(offered) == {"add": schema}


@pytest.mark.parametrize(("calls", "reason"), [([], "stop"), ([CALL], "tool_calls")])
def test_the_reason_of_a_complete_message_says_whether_it_calls_tools(calls, reason):
    message = assistant_message("done", calls)
    assert finish_reason(message) == reason
    assert ("tool_calls" in message) == bool(calls)
