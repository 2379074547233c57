"""The official openai client, 1.x to 3.x: chat, completions, Responses, models, errors."""

from __future__ import annotations

import asyncio
import json

import pytest

openai = pytest.importorskip("openai")

from support.gateway.client_calls import CALL

USER = [{"role": "user", "content": "What is 12+7?"}]
PARAMETERS = {"type": "object", "properties": {"expression": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "calculator", "parameters": PARAMETERS}}]


@pytest.fixture
def client(attempt):
    with openai.OpenAI(base_url=f"{attempt.url}/v1", api_key=attempt.key, max_retries=0) as made:
        yield made


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_with_a_tool(attempt, client, stream):
    attempt.play(f"I will count. {CALL}", "It is 19.")
    messages = list(USER)
    for _ in range(2):
        reply = client.chat.completions.create(model="policy", messages=messages, tools=TOOLS, stream=stream)
        message = _gathered(reply) if stream else reply.choices[0].message.model_dump(exclude_none=True)
        messages.append(message)
        for call in message.get("tool_calls") or ():
            assert json.loads(call["function"]["arguments"]) == {"expression": "12+7"}
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": "19"})
    assert messages[-1]["content"] == "It is 19."
    attempt.continued()


def _gathered(stream):
    content, calls, reason = "", [], None
    for chunk in stream:
        for choice in chunk.choices:
            content += choice.delta.content or ""
            calls += [call.model_dump(exclude={"index"}) for call in choice.delta.tool_calls or ()]
            reason = choice.finish_reason or reason
    assert reason == ("tool_calls" if calls else "stop")
    return {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})}


def test_every_choice_is_kept_and_parameters_reach_the_engine(attempt, client):
    attempt.play("one", "two", "three")
    reply = client.chat.completions.create(
        model="policy", messages=USER, n=3, temperature=0.7, top_p=0.9, stop=["!"], seed=5, max_tokens=20, logprobs=True
    )
    (call,) = attempt.calls(1)
    assert sorted(choice.message.content for choice in reply.choices) == ["one", "three", "two"]
    for told, kept in zip(reply.choices, call.choices, strict=True):
        assert [token.logprob for token in told.logprobs.content] == pytest.approx(list(kept.logprobs))
    assert (call.sampling["temperature"], call.sampling["top_p"], call.sampling["max_tokens"]) == (0.7, 0.9, 20)
    assert {sampling.stop for sampling in attempt.samplings} == {("!",)}


async def test_sixty_four_streams_at_once(attempt):
    attempt._server.engine.play(lambda prompt: prompt.split("user\n")[1].split("<|im_end|>")[0])
    async with openai.AsyncOpenAI(base_url=f"{attempt.url}/v1", api_key=attempt.key, max_retries=0) as client:

        async def ask(number):
            messages = [{"role": "user", "content": f"number {number}"}]
            stream = await client.chat.completions.create(model="policy", messages=messages, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        answers = await asyncio.gather(*(ask(number) for number in range(64)))
    assert answers == [f"number {number}" for number in range(64)]
    attempt.calls(64)


def test_completions_and_models(attempt, client):
    attempt.play(" upon a time")
    assert client.completions.create(model="policy", prompt="Once", max_tokens=50).choices[0].text == " upon a time"
    attempt.play(" upon a time")
    chunks = client.completions.create(model="policy", prompt="Once", max_tokens=50, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == " upon a time"
    attempt.calls(2)
    assert [model.id for model in client.models.list()] == ["policy"]


def test_errors_are_those_of_the_client(attempt, client):
    with pytest.raises(openai.BadRequestError, match="temprature"):
        client.chat.completions.create(model="policy", messages=USER, extra_body={"temprature": 1})
    wrong = openai.OpenAI(base_url=f"{attempt.url}/v1", api_key="lk-wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        wrong.chat.completions.create(model="policy", messages=USER)


needs_responses = pytest.mark.skipif(not hasattr(openai.OpenAI, "responses"), reason="this openai has no Responses")


@needs_responses
@pytest.mark.parametrize("stream", [False, True])
def test_responses_with_a_tool(attempt, client, stream):
    attempt.play(f"I will count. {CALL}", "It is 19.")
    tools = [{"type": "function", "name": "calculator", "parameters": PARAMETERS, "strict": False}]
    items = [{"role": "user", "content": "What is 12+7?"}]
    for _ in range(2):
        reply = client.responses.create(model="policy", input=items, tools=tools, stream=stream)
        if stream:
            events = list(reply)
            told = "".join(event.delta for event in events if event.type == "response.output_text.delta")
            reply = events[-1].response
            assert told == reply.output_text
        items += [item.model_dump(exclude_none=True) for item in reply.output]
        for item in reply.output:
            if item.type == "function_call":
                items.append({"type": "function_call_output", "call_id": item.call_id, "output": "19"})
    assert (reply.output_text, reply.status) == ("It is 19.", "completed")
    attempt.continued()


@needs_responses
def test_a_response_goes_on_by_id(attempt, client):
    attempt.play("Hello Ann.", "Ann.")
    first = client.responses.create(model="policy", input="I am Ann.")
    second = client.responses.create(model="policy", input="Who am I?", previous_response_id=first.id)
    assert second.output_text == "Ann."
    attempt.continued()


@needs_responses
def test_the_responses_stream_helper_reads_our_events(attempt, client):
    attempt.play("Hello.")
    with client.responses.stream(model="policy", input="hi") as stream:
        assert stream.get_final_response().output_text == "Hello."
    attempt.calls(1)
