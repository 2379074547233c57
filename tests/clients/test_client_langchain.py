"""LangChain's ChatOpenAI, over chat completions and over Responses."""

from __future__ import annotations

import pytest

models = pytest.importorskip("langchain_openai")

from support.gateway.client_calls import CALL, asked

TOOL = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "counts",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
    },
}


@pytest.mark.parametrize("responses", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_with_a_tool(attempt, responses, stream):
    from langchain_core.messages import ToolMessage

    attempt.play(f"I will count. {CALL}", "It is 19.")
    options = {"base_url": f"{attempt.url}/v1", "api_key": attempt.key, "max_retries": 0}
    model = models.ChatOpenAI(model="policy", use_responses_api=responses, **options).bind_tools([TOOL])
    messages = [("user", "What is 12+7?")]
    first = asked(model, messages, stream)
    assert first.tool_calls[0]["args"] == {"expression": "12+7"}
    result = ToolMessage("19", tool_call_id=first.tool_calls[0]["id"])
    assert "It is 19." in str(asked(model, [*messages, first, result], stream).content)
    attempt.continued()
