"""Reasoning and calls of other formats through the gateway: every surface, whole and streamed, and on record."""

# ruff: noqa: RUF001 - DeepSeek's own letters

from __future__ import annotations

import json

import httpx
import openai
import pytest

from lightning_trainer.reasons import continuation as reasons
from lightning_trainer.reasons.continuation import ContinuationReason
from support.fakes import ByteTokenizer, FakeEngine, served
from support.models.families import THINKING
from support.models.model_families import all_families, tokenizer_of

THINKING = "{% if reasoning_effort %}{{ '(' + reasoning_effort + ')' }}{% endif %}" + THINKING
ANSWER = "<think>\nI should\nadd.\n</think>\n\nIt is 19."
USER = {"role": "user", "content": "What is 12+7?"}
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"note": {"type": "string"}}},
    },
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with served(tmp_path_factory.mktemp("server"), FakeEngine(tokenizer=ByteTokenizer(THINKING))) as running:
        yield running


@pytest.fixture
def attempt(request, server):
    server.engine.play([ANSWER] * 3)
    return request.node.name


@pytest.fixture
def client(server, attempt):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=server.key(attempt), max_retries=0) as made:
        yield made


@pytest.fixture
def post(server, attempt):
    def send(path, body):
        headers = {"authorization": f"Bearer {server.key(attempt)}"}
        return httpx.post(f"{server.url}{path}", json={"model": "policy", **body}, headers=headers)

    return send


def test_chat_has_reasoning_content_whole_and_streamed(server, attempt, client):
    whole = client.chat.completions.create(model="policy", messages=[USER])
    message = whole.choices[0].message
    assert (message.reasoning_content, message.content) == ("I should\nadd.", "It is 19.")
    assert whole.usage.completion_tokens_details.reasoning_tokens > 5
    chunks = list(client.chat.completions.create(model="policy", messages=[USER], stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "I should\nadd."
    assert "".join(delta.content or "" for delta in deltas) == "It is 19."
    one, two = (call.choices[0] for call in server.calls(attempt))
    assert one.message == two.message == {"role": "assistant", **_parts("I should\nadd.", "It is 19.")}
    assert server.engine.tokenizer.decode(one.token_ids, skip_special_tokens=True) == ANSWER  # trained as sampled


def _parts(reasoning, content):
    return {"content": content, "reasoning_content": reasoning}


def test_responses_have_reasoning_items_and_go_on_with_them(server, attempt, client):
    first = client.responses.create(model="policy", input="What is 12+7?")
    assert [item.type for item in first.output] == ["reasoning", "message"]
    assert first.output[0].content[0].text == "I should\nadd."
    assert first.output_text == "It is 19."
    assert first.usage.output_tokens_details.reasoning_tokens > 5
    items = [USER, *(item.model_dump(exclude_none=True) for item in first.output), {"role": "user", "content": "Sure?"}]
    client.responses.create(model="policy", input=items)
    assert [call.sampling[reasons.CONTINUATION] for call in server.calls(attempt)] == [
        ContinuationReason.BEGINS,
        ContinuationReason.FORKED,
    ]
    events = list(client.responses.create(model="policy", input="again", stream=True))
    thought = "".join(event.delta for event in events if event.type == "response.reasoning_text.delta")
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert (thought, text) == ("I should\nadd.", "It is 19.")


def test_messages_have_thinking_blocks_and_take_them_back(server, attempt, post):
    asked = {"max_tokens": 200, "messages": [USER], "thinking": {"type": "enabled", "budget_tokens": 1024}}
    content = post("/v1/messages", asked).json()["content"]
    assert content == [
        {"type": "thinking", "thinking": "I should\nadd.", "signature": ""},
        {"type": "text", "text": "It is 19."},
    ]
    more = [USER, {"role": "assistant", "content": content}, {"role": "user", "content": "Sure?"}]
    post("/v1/messages", {**asked, "messages": more})
    first, second = server.calls(attempt)
    assert (first.sampling["template"], second.sampling[reasons.CONTINUATION]) == (
        {"reasoning_effort": "medium"},
        ContinuationReason.FORKED,
    )
    streamed = post("/v1/messages", {**asked, "stream": True}).text
    assert '"type":"thinking_delta","thinking":' in streamed


def test_an_answer_cut_inside_reasoning_counts_as_cut(server, attempt, client):
    cut = client.chat.completions.create(model="policy", messages=[USER], max_tokens=14)
    assert cut.choices[0].finish_reason == "length"
    assert (cut.choices[0].message.content, cut.choices[0].message.reasoning_content) == ("", "I shou")


def test_the_templates_switches_are_passed_and_recorded(server, attempt, client):
    client.chat.completions.create(model="policy", messages=[USER], reasoning_effort="high")
    assert server.engine.prompts[-1] is not None
    (call,) = server.calls(attempt)
    assert call.sampling["template"] == {"reasoning_effort": "high"}
    assert bytes(call.prompt_token_ids[:6]) == b"(high)"
    with pytest.raises(openai.BadRequestError, match="does not look at no_such"):
        client.chat.completions.create(
            model="policy", messages=[USER], extra_body={"chat_template_kwargs": {"no_such": 1}}
        )


def test_answers_that_look_like_calls_of_another_format_are_put_on_record(server, attempt, client):
    server.engine.play(['[TOOL_CALLS] [{"name": "add", "arguments": {}}]', "<tool_call>\nbroken", "19"])
    for _ in range(3):
        client.chat.completions.create(model="policy", messages=[USER], tools=[TOOL])
    told = [call.sampling.get(reasons.UNREAD) for call in server.calls(attempt)]
    assert told == [{"0": "mistral"}, {"0": reasons.MALFORMED}, None]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "name", ["Qwen3.5", "gpt-oss", "GLM-4.5", "Llama 3.1", "Mistral v3", "DeepSeek V3.1", "Gemma 4"]
)
def test_calls_of_other_formats_reach_the_agent_and_rows_go_on(tmp_path, name, stream):
    pytest.importorskip("transformers")
    family = {family.name: family for family in all_families()}.get(name)
    if family is None:
        pytest.skip("trl's templates are not here")
    from lightning_trainer.gateway.prompt.template import ChatFormat

    tokenizer = tokenizer_of(family)
    written = {
        "qwen-xml": "hm\n</think>\n\n<tool_call>\n<function=add>\n<parameter=note>\nü 7\n</parameter>\n"
        "</function>\n</tool_call><|im_end|>",
        "harmony": "<|channel|>analysis<|message|>hm<|end|><|start|>assistant to=functions.add<|channel|>commentary"
        ' json<|message|>{"note": "ü 7"}<|call|>',
        "glm": "\n<think>hm</think>\n<tool_call>add\n<arg_key>note</arg_key>\n<arg_value>ü 7</arg_value>\n"
        "</tool_call><|observation|>",
        "llama-json": '{"name": "add", "parameters": {"note":"ü 7"}}<|eot_id|>',
        "mistral": '[TOOL_CALLS] [{"name": "add", "arguments": {"note":"ü 7"}}]</s>',
        "deepseek-v3": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"note":"ü 7"}<｜tool▁call▁end｜>'
        "<｜tool▁calls▁end｜><｜end▁of▁sentence｜>",
        "gemma": '<|tool_call>call:add{note:<|"|>ü 7<|"|>}<tool_call|><|tool_response>',
    }[family.format]
    ids = ChatFormat(tokenizer).encode(written)
    tokenizer.eos_token = tokenizer.decode(ids[-1:])  # the fake engine ends every answer with it
    with served(tmp_path, FakeEngine([ids], tokenizer=tokenizer)) as running:
        with openai.OpenAI(base_url=f"{running.url}/v1", api_key=running.key("a"), max_retries=0) as client:
            if stream:
                with client.chat.completions.stream(model="policy", messages=[USER], tools=[TOOL]) as events:
                    message = events.get_final_completion().choices[0].message
            else:
                message = (
                    client.chat.completions.create(model="policy", messages=[USER], tools=[TOOL]).choices[0].message
                )
            (call,) = message.tool_calls
            assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"note": "ü 7"})
            answer = message.model_dump(include={"role", "content", "tool_calls"})  # without its reasoning
            result = {"role": "tool", "tool_call_id": call.id, "content": "19"}
            client.chat.completions.create(model="policy", messages=[USER, answer, result], tools=[TOOL])
        first, second = running.calls("a")
    held = (*first.prompt_token_ids, *first.choices[0].token_ids)
    how = second.sampling[reasons.CONTINUATION]
    assert how == ContinuationReason.JOINED, how
    assert second.prompt_token_ids[: len(held)] == held


@pytest.mark.parametrize(
    ("name", "body", "says"),
    [
        ("Qwen3.5", {"tools": [TOOL], "tool_choice": "required"}, "begins the answer with reasoning"),
        ("Qwen3.5", {"response_format": {"type": "json_object"}}, "begins the answer with reasoning"),
    ],
)
def test_what_no_grammar_holds_to_is_refused(tmp_path, name, body, says):
    pytest.importorskip("transformers")
    family = {family.name: family for family in all_families()}.get(name)
    if family is None:
        pytest.skip("trl's templates are not here")

    class Able(FakeEngine):
        abilities = frozenset({"grammar"})

    with (
        served(tmp_path, Able(tokenizer=tokenizer_of(family))) as running,
        openai.OpenAI(base_url=f"{running.url}/v1", api_key=running.key("a"), max_retries=0) as client,
        pytest.raises(openai.BadRequestError, match=says),
    ):
        client.chat.completions.create(model="policy", messages=[USER], **body)
