"""litellm, as OpenAI's client and as Anthropic's."""

from __future__ import annotations

import json

import pytest

litellm = pytest.importorskip("litellm")

from support.gateway.client_calls import CALL

USER = [{"role": "user", "content": "What is 12+7?"}]
PARAMETERS = {"type": "object", "properties": {"expression": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "calculator", "parameters": PARAMETERS}}]


@pytest.fixture(params=["openai", "anthropic"])
def options(request, attempt):
    base = f"{attempt.url}/v1" if request.param == "openai" else attempt.url
    return {"model": f"{request.param}/policy", "api_base": base, "api_key": attempt.key, "max_tokens": 300}


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_with_a_tool(attempt, options, stream):
    attempt.play(f"I will count. {CALL}", "It is 19.")
    messages = list(USER)
    for _ in range(2):
        reply = litellm.completion(messages=messages, tools=TOOLS, stream=stream, **options)
        if stream:
            reply = litellm.stream_chunk_builder(list(reply), messages=messages)
        message = reply.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls or ():
            assert json.loads(call.function.arguments) == {"expression": "12+7"}
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "19"})
    assert message.content == "It is 19."
    attempt.continued()


def test_responses(attempt):
    attempt.play("It is 19.")
    options = {"api_base": f"{attempt.url}/v1", "api_key": attempt.key}
    reply = litellm.responses(model="openai/policy", input="What is 12+7?", **options)
    assert reply.output[0].content[0].text == "It is 19."
    attempt.calls(1)


async def test_async_streams(attempt, options):
    attempt.play("It is 19.")
    stream = await litellm.acompletion(messages=USER, stream=True, **options)
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "It is 19."
    attempt.calls(1)


def test_refusals_are_errors(attempt, options):
    with pytest.raises(litellm.exceptions.BadRequestError):
        litellm.completion(messages=USER, tools=TOOLS, tool_choice="required", **options)
