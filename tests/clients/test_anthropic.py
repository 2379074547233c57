"""The official anthropic client, and LangChain's model over it."""

from __future__ import annotations

import pytest

anthropic = pytest.importorskip("anthropic")

from support.gateway.client_calls import CALL, asked

TOOLS = [{"name": "calculator", "input_schema": {"type": "object", "properties": {"expression": {"type": "string"}}}}]
USER = {"role": "user", "content": "What is 12+7?"}


@pytest.fixture
def client(attempt):
    with anthropic.Anthropic(base_url=attempt.url, api_key=attempt.key, max_retries=0) as made:
        yield made


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_with_a_tool(attempt, client, stream):
    attempt.play(f"I will count. {CALL}", "It is 19.")
    messages = [USER]
    for _ in range(2):
        asked = {"model": "policy", "max_tokens": 300, "system": "Be brief.", "messages": messages, "tools": TOOLS}
        if stream:
            with client.messages.stream(**asked) as events:
                told = "".join(events.text_stream)
                message = events.get_final_message()
            assert told == message.content[0].text
        else:
            message = client.messages.create(**asked)
        messages = [*messages, {"role": "assistant", "content": [block.model_dump() for block in message.content]}]
        for block in message.content:
            if block.type == "tool_use":
                assert block.input == {"expression": "12+7"}
                result = {"type": "tool_result", "tool_use_id": block.id, "content": "19"}
                messages.append({"role": "user", "content": [result]})
    assert (message.content[0].text, message.stop_reason) == ("It is 19.", "end_turn")
    attempt.continued()
    assert message.id == attempt.calls(2)[1].response_id
    assert message.usage.input_tokens == len(attempt.calls(2)[1].prompt_token_ids)


async def test_the_async_client_streams(attempt):
    attempt.play("Hello.")
    async with anthropic.AsyncAnthropic(base_url=attempt.url, api_key=attempt.key, max_retries=0) as client:
        stream = await client.messages.create(model="policy", max_tokens=50, messages=[USER], stream=True)
        kinds = [event.type async for event in stream]
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    attempt.calls(1)


def test_tokens_are_counted_and_models_listed(attempt, client):
    counted = client.messages.count_tokens(model="policy", messages=[USER]).input_tokens
    assert counted == client.messages.create(model="policy", max_tokens=9, messages=[USER]).usage.input_tokens
    assert [model.id for model in client.models.list()] == ["policy"]


def test_errors_are_those_of_the_client(attempt, client):
    thinking = {"type": "soon"}
    with pytest.raises(anthropic.BadRequestError, match="thinking"):
        client.messages.create(model="policy", max_tokens=2000, messages=[USER], thinking=thinking)
    wrong = anthropic.Anthropic(base_url=attempt.url, api_key="lk-wrong", max_retries=0)
    with pytest.raises(anthropic.AuthenticationError):
        wrong.messages.create(model="policy", max_tokens=9, messages=[USER])


def test_a_token_of_the_environment_opens_too(attempt):
    client = anthropic.Anthropic(base_url=attempt.url, auth_token=attempt.key, api_key=None, max_retries=0)
    client.messages.create(model="policy", max_tokens=9, messages=[USER])
    attempt.calls(1)


@pytest.mark.parametrize("stream", [False, True])
def test_langchain_asks_with_tools(attempt, stream):
    models = pytest.importorskip("langchain_anthropic")
    attempt.play(f"I will count. {CALL}", "It is 19.")
    model = models.ChatAnthropic(
        model="policy", base_url=attempt.url, api_key=attempt.key, max_retries=0, max_tokens=300
    )
    model = model.bind_tools(
        [{"name": "calculator", "description": "counts", "input_schema": TOOLS[0]["input_schema"]}]
    )
    messages = [("user", "What is 12+7?")]
    first = asked(model, messages, stream)
    assert first.tool_calls[0]["args"] == {"expression": "12+7"}
    from langchain_core.messages import ToolMessage

    result = ToolMessage("19", tool_call_id=first.tool_calls[0]["id"])
    assert "It is 19." in str(asked(model, [*messages, first, result], stream).content)
    attempt.continued()
