"""Every way to ask for an answer: the same tokens on record, and the client's own shape for what it gets."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from lightning_trainer.gateway.http.errors import Refusal
from lightning_trainer.gateway.surfaces.conversations import Conversations
from support.fakes import ByteTokenizer, FakeEngine, fake_logprob, served

PARAMETERS = {"type": "object", "properties": {"expression": {"type": "string"}}}
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression":"12+7"}}\n</tool_call>'
CHAT_TOOLS = [{"type": "function", "function": {"name": "calculator", "parameters": PARAMETERS}}]
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
ASKED = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi", "max_tokens": 100},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 100},
}


@pytest.fixture
def post(server, attempt):
    def send(path, body, **headers):
        given = headers or {"authorization": f"Bearer {server.key(attempt)}"}
        return httpx.post(f"{server.url}{path}", json={"model": "policy", **body}, headers=given)

    return send


def events(reply):
    """The named events of a stream."""
    assert reply.status_code == 200, reply.text
    blocks = [block.split("\n") for block in reply.text.strip().split("\n\n")]
    found = []
    for name, data in blocks:
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


def said(path, reply):
    """The text of an answer on any surface."""
    data = reply.json()
    if path == "/v1/responses":
        return data["output"][0]["content"][0]["text"]
    if path == "/v1/messages":
        return data["content"][0]["text"]
    return data["choices"][0].get("text") or data["choices"][0]["message"]["content"]


@pytest.mark.parametrize("path", PATHS)
def test_one_call_with_the_engines_own_tokens_is_kept_whatever_the_surface(server, attempt, post, path):
    server.engine.play(["12+7 is 19"])
    reply = post(path, ASKED[path])
    assert said(path, reply) == "12+7 is 19"
    (call,) = server.calls(attempt)
    ids = (*b"12+7 is 19", ByteTokenizer.eos_token_id)
    assert call.response_id == reply.json()["id"]
    assert call.prompt_token_ids == server.engine.prompts[0]
    assert call.choices[0].token_ids == ids
    assert call.choices[0].logprobs == pytest.approx([fake_logprob(token) for token in ids])
    assert (call.policy_version, call.error, call.attempt_id) == (7, None, attempt)


@pytest.mark.parametrize("path", PATHS)
def test_a_stream_keeps_the_same_record(server, attempt, post, path):
    server.engine.play(["Hello, wörld!", "Hello, wörld!"])
    post(path, ASKED[path])
    streamed = post(path, {**ASKED[path], "stream": True})
    assert streamed.headers["content-type"].startswith("text/event-stream")
    first, second = server.calls(attempt)
    assert (first.choices, first.prompt_token_ids) == (second.choices, second.prompt_token_ids)
    assert second.response_id in streamed.text


@pytest.mark.parametrize("path", PATHS)
def test_a_refusal_is_recorded_and_told_in_the_surfaces_shape(server, attempt, post, path):
    reply = post(path, {**ASKED[path], "temprature": 1})
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert "temprature" in error["message"]
    assert reply.json().get("type") == ("error" if path == "/v1/messages" else None)
    assert "temprature" in server.calls(attempt)[0].error


@pytest.mark.parametrize("path", PATHS)
def test_without_a_key_nothing_is_answered_or_recorded(server, attempt, post, path):
    reply = post(path, ASKED[path], authorization="Bearer no")
    assert reply.status_code == 401
    assert reply.json()["error"]["message"]
    assert server.calls(attempt) == []


@pytest.mark.parametrize("path", PATHS)
def test_an_engine_that_fails_in_a_stream_ends_it_with_an_error(server, attempt, post, path, monkeypatch):
    class Breaks(FakeEngine):
        def _pieces(self, ids, text, finish):
            yield from list(super()._pieces(ids, text, finish))[:2]
            raise RuntimeError("out of memory")

    monkeypatch.setattr(server.app.state.gateway._models._served["policy"], "engine", Breaks(["a long answer"]))
    text = post(path, {**ASKED[path], "stream": True}).text
    assert "out of memory" in text
    assert "[DONE]" not in text
    assert "message_stop" not in text
    assert "response.completed" not in text
    (call,) = server.calls(attempt)
    assert "out of memory" in call.error
    assert call.choices[0].message["content"] == "a long a"


def test_a_completion_goes_on_from_a_text_without_a_template(server, attempt, client):
    server.engine.play([" upon a time"])
    reply = client.completions.create(model="policy", prompt="Once", max_tokens=5, logprobs=0)
    assert server.engine.prompts[0] == tuple(b"Once")
    assert (reply.choices[0].text, reply.choices[0].finish_reason) == (" upon", "length")
    assert reply.choices[0].logprobs.tokens == [" ", "u", "p", "o", "n"]
    assert reply.choices[0].logprobs.text_offset == [0, 1, 2, 3, 4]
    assert reply.choices[0].logprobs.token_logprobs == pytest.approx(list(server.calls(attempt)[0].choices[0].logprobs))


def test_a_completion_takes_token_ids_and_streams(server, attempt, client):
    server.engine.play(["one", "two"])
    chunks = list(client.completions.create(model="policy", prompt=[72, 105], n=2, stream=True))
    texts = {0: "", 1: ""}
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert server.engine.prompts == [(72, 105)] * 2
    assert sorted(texts.values()) == ["one", "two"]
    assert len(server.calls(attempt)[0].choices) == 2


def test_a_streamed_completion_has_the_logprobs_of_tokens_without_text(server, attempt, client):
    server.engine.play(["okokEND"] * 2)
    asked = {"model": "policy", "prompt": "x", "max_tokens": 50, "logprobs": 0, "stop": ["END"]}
    whole = client.completions.create(**asked).choices[0].logprobs
    chunks = [choice.logprobs for chunk in client.completions.create(**asked, stream=True) for choice in chunk.choices]
    streamed = [logprobs for logprobs in chunks if logprobs is not None]
    assert whole.tokens == list("okokEND")
    for name in ("tokens", "token_logprobs", "text_offset"):
        assert [value for logprobs in streamed for value in getattr(logprobs, name)] == getattr(whole, name)


def test_a_streamed_response_has_the_logprobs_of_tokens_before_its_text(server, attempt, client):
    server.engine.play(["<tool or box>"] * 2)
    tools = [{"type": "function", "name": "calculator", "parameters": PARAMETERS, "strict": False}]
    asked = {"model": "policy", "input": "x", "tools": tools, "include": ["message.output_text.logprobs"]}
    whole = client.responses.create(**asked).output[0].content[0].logprobs
    *_, last = client.responses.create(**asked, stream=True)  # its first tokens could begin a call, so no text is sent
    assert [one.token for one in whole][:3] == ["<", "t", "o"]
    assert last.response.output[0].content[0].logprobs == whole


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"prompt": ""}, "prompt"),
        ({"logprobs": 1}, "Set logprobs to 0"),
    ],
)
def test_what_a_completion_does_not_do_is_refused(server, attempt, client, body, says):
    with pytest.raises(openai.BadRequestError, match=says):
        client.completions.create(model="policy", prompt="x", extra_body=body)
    assert server.calls(attempt)[0].error


def test_a_response_is_read_by_the_official_client(server, attempt, client):
    server.engine.play(["19"])
    reply = client.responses.create(
        model="policy", instructions="Be brief.", input="What is 12+7?", max_output_tokens=9
    )
    (call,) = server.calls(attempt)
    assert (reply.output_text, reply.status, reply.id) == ("19", "completed", call.response_id)
    assert (reply.usage.input_tokens, reply.usage.output_tokens) == (len(call.prompt_token_ids), 3)
    assert call.request["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 12+7?"},
    ]
    assert server.engine.samplings[0].max_tokens == 9


def test_a_responses_tool_calls_come_back_as_one_message(server, attempt, client):
    tools = [{"type": "function", "name": "calculator", "parameters": PARAMETERS, "strict": False}]
    server.engine.play([f"Let me count. {CALL}{CALL}", "19"])
    first = client.responses.create(model="policy", input="What is 12+7?", tools=tools)
    assert [item.type for item in first.output] == ["message", "function_call", "function_call"]
    results = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "19"}
        for item in first.output
        if item.type == "function_call"
    ]
    items = [{"role": "user", "content": "What is 12+7?"}, *(item.model_dump() for item in first.output), *results]
    client.responses.create(model="policy", input=items, tools=tools)
    one, two = server.calls(attempt)
    assert [message["role"] for message in two.request["messages"]] == ["user", "assistant", "tool", "tool"]
    assert two.request["messages"][1]["tool_calls"] == one.choices[0].message["tool_calls"]
    before = one.prompt_token_ids + one.choices[0].token_ids
    assert two.prompt_token_ids[: len(before)] == before


def test_a_response_goes_on_from_an_earlier_one_of_the_same_attempt(server, attempt, client):
    server.engine.play(["Hello Ann.", "Ann.", "no"])
    first = client.responses.create(model="policy", instructions="Be kind.", input="I am Ann.")
    second = client.responses.create(model="policy", input="Who am I?", previous_response_id=first.id)
    third = client.responses.create(model="policy", input="Sure?", previous_response_id=second.id)
    calls = server.calls(attempt)
    assert [m["content"] for m in calls[1].request["messages"]] == ["I am Ann.", "Hello Ann.", "Who am I?"]
    assert [m["content"] for m in calls[2].request["messages"]][-3:] == ["Who am I?", "Ann.", "Sure?"]
    assert third.previous_response_id == second.id


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_names_items_of_earlier_responses_by_their_ids(server, attempt, post, stream):
    """As Vercel's AI SDK does by default; the results of tools are the only new items of its second request."""
    server.engine.play([f"Let me count. {CALL}", "19"])
    tools = [{"type": "function", "name": "calculator", "parameters": PARAMETERS}]
    user = {"role": "user", "content": [{"type": "input_text", "text": "12+7?"}]}
    reply = post("/v1/responses", {"input": [user], "tools": tools, "stream": stream})
    items = events(reply)[-1]["response"]["output"] if stream else reply.json()["output"]
    assert [item["type"] for item in items] == ["message", "function_call"]
    named = [{"type": "item_reference", "id": item["id"]} for item in items]
    result = {"type": "function_call_output", "call_id": items[1]["call_id"], "output": "19"}
    more = {"input": [user, *named, result], "tools": tools}
    assert post("/v1/responses", more).status_code == 200
    one, two = server.calls(attempt)
    assert two.request["messages"][1]["content"] == "Let me count. "
    before = one.prompt_token_ids + one.choices[0].token_ids
    assert two.prompt_token_ids[: len(before)] == before
    refused = post("/v1/responses", more, authorization=f"Bearer {server.key(f'not {attempt}')}")
    assert refused.status_code == 400
    assert "store to false" in refused.json()["error"]["message"]


def test_another_attempts_response_is_not_known(server, attempt, client):
    first = client.responses.create(model="policy", input="secret")
    unkept = client.responses.create(model="policy", input="secret", store=False)
    other = openai.OpenAI(base_url=f"{server.url}/v1", api_key=server.key(f"not {attempt}"), max_retries=0)
    for asked, response_id in ((other, first.id), (client, unkept.id), (client, "resp_none")):
        with pytest.raises(openai.BadRequestError, match="not known") as refused:
            asked.responses.create(model="policy", input="more", previous_response_id=response_id)
        assert refused.value.code == "previous_response_not_found"


def test_a_responses_stream_tells_each_part_and_then_the_whole(server, attempt, post):
    server.engine.play([f"Let me count. {CALL}"])
    tools = [{"type": "function", "name": "calculator", "parameters": PARAMETERS}]
    found = events(post("/v1/responses", {"input": "12+7?", "tools": tools, "stream": True}))
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    names = [event["type"].removeprefix("response.") for event in found]
    assert names[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert names[-5:] == [
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    whole = found[-1]["response"]
    assert "".join(e["delta"] for e in found if e["type"] == "response.output_text.delta") == "Let me count. "
    assert whole["output"] == [e["item"] for e in found if e["type"] == "response.output_item.done"]
    assert whole["output"][1]["arguments"] == '{"expression": "12+7"}'
    assert whole["usage"]["output_tokens"] == len(server.calls(attempt)[0].choices[0].token_ids)


def test_a_cut_response_says_so(server, attempt, client):
    server.engine.play(["a long answer"] * 2)
    cut = client.responses.create(model="policy", input="hi", max_output_tokens=3)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    last = list(client.responses.create(model="policy", input="hi", max_output_tokens=3, stream=True))[-1]
    assert last.type == "response.incomplete"


def test_reasoning_items_reach_the_engine(server, attempt, client):
    items = [
        {"role": "user", "content": "hi"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hello."}]},
        {"role": "user", "content": [{"type": "input_text", "text": "again"}]},
    ]
    client.responses.create(model="policy", input=items)
    (call,) = server.calls(attempt)
    answer = {"role": "assistant", "content": "Hello.", "reasoning_content": "Hm."}
    assert call.request["messages"] == [items[0], answer, {"role": "user", "content": "again"}]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"tools": [{"type": "web_search"}]}, "web_search"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["web_search_call.results"]}, "include"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "item_reference"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:x"}]}]}, "image_url"),
        ({"input": []}, "input"),
        ({"input": {"a": 1}}, "input"),
        ({"reasoning": {"effort": 3}}, "reasoning_effort"),
        ({"text": {"format": {"type": "json_object"}}}, "constrained"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"n": 2}, "n=2"),
    ],
)
def test_what_a_response_can_not_have_is_refused(server, attempt, client, body, says):
    with pytest.raises(openai.BadRequestError, match=says):
        client.responses.create(model="policy", input="x", extra_body=body)
    assert says in server.calls(attempt)[0].error


def test_messages_take_system_tools_results_and_stop_sequences(server, attempt, post):
    server.engine.play([f"Let me count. {CALL}", "19; and so on"])
    tools = [{"name": "calculator", "description": "d", "input_schema": PARAMETERS}]
    user = {"role": "user", "content": [{"type": "text", "text": "12+7?", "cache_control": {"type": "ephemeral"}}]}
    body = {"system": [{"type": "text", "text": "Be brief."}], "tools": tools, "max_tokens": 200, "messages": [user]}
    first = post("/v1/messages", body).json()
    assert first["stop_reason"] == "tool_use"
    assert [block["type"] for block in first["content"]] == ["text", "tool_use"]
    assert first["content"][1]["input"] == {"expression": "12+7"}
    result = {"type": "tool_result", "tool_use_id": first["content"][1]["id"], "content": "19", "is_error": True}
    messages = [user, {"role": "assistant", "content": first["content"]}, {"role": "user", "content": [result]}]
    second = post("/v1/messages", {**body, "messages": messages, "stop_sequences": [";"]}).json()
    assert (second["stop_reason"], second["stop_sequence"], second["content"][0]["text"]) == (
        "stop_sequence",
        ";",
        "19",
    )
    one, two = server.calls(attempt)
    roles = [message["role"] for message in two.request["messages"]]
    assert roles == ["system", "user", "assistant", "tool"]
    assert two.request["messages"][-1]["content"] == "Error: 19"
    assert first["usage"]["input_tokens"] == len(one.prompt_token_ids)
    assert first["usage"]["output_tokens"] == len(one.choices[0].token_ids)
    before = one.prompt_token_ids + one.choices[0].token_ids
    assert two.prompt_token_ids[: len(before)] == before


def test_a_messages_stream_has_blocks_in_order(server, attempt, post):
    server.engine.play([f"Let me count. {CALL}"])
    tools = [{"name": "calculator", "input_schema": PARAMETERS}]
    found = events(post("/v1/messages", {**ASKED["/v1/messages"], "max_tokens": 200, "tools": tools, "stream": True}))
    names = [event["type"] for event in found if event["type"] != "content_block_delta"]
    assert names == [
        "message_start",
        "content_block_start",
        "content_block_stop",
        "content_block_start",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    text = "".join(e["delta"].get("text", "") for e in found if e["type"] == "content_block_delta")
    partial = "".join(e["delta"].get("partial_json", "") for e in found if e["type"] == "content_block_delta")
    assert (text, json.loads(partial)) == ("Let me count. ", {"expression": "12+7"})
    assert found[-2]["delta"]["stop_reason"] == "tool_use"
    (call,) = server.calls(attempt)
    assert found[0]["message"]["usage"]["input_tokens"] == len(call.prompt_token_ids)
    assert found[-2]["usage"]["output_tokens"] == len(call.choices[0].token_ids)


@pytest.fixture(scope="module")
def reasoning_server(tmp_path_factory):
    from support.models.families import THINKING

    with served(tmp_path_factory.mktemp("reasoning"), FakeEngine(tokenizer=ByteTokenizer(THINKING))) as running:
        yield running


def blocks(reply, stream):
    """The types of an answer's blocks, and the first one's text."""
    if not stream:
        content = reply.json()["content"]
        return [block["type"] for block in content], content[0].get("text")
    found = events(reply)
    started = [e for e in found if e["type"] == "content_block_start"]
    assert [e["index"] for e in started] == list(range(len(started)))
    assert [e["index"] for e in found if e["type"] == "content_block_stop"] == list(range(len(started)))
    deltas = [e["delta"] for e in found if e["type"] == "content_block_delta" and e["index"] == 0]
    text = "".join(delta["text"] for delta in deltas) if started[0]["content_block"]["type"] == "text" else None
    return [e["content_block"]["type"] for e in started], text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("thinking", [None, {"type": "disabled"}, {"type": "adaptive"}])
def test_messages_have_thinking_blocks_only_where_they_are_requested(reasoning_server, request, thinking, stream):
    attempt, server = request.node.name, reasoning_server
    server.engine.play([f"<think>\nhm\n</think>\n\nLet me count. {CALL}", "<think>\nand so on"])
    tools = [{"name": "calculator", "input_schema": PARAMETERS}]
    asked = {"model": "policy", "tools": tools, "thinking": thinking, "stream": stream}

    def send(messages, most=200):
        body = {**asked, "messages": messages, "max_tokens": most}
        return httpx.post(f"{server.url}/v1/messages", json=body, headers={"x-api-key": server.key(attempt)})

    user = {"role": "user", "content": "12+7?"}
    requested = thinking == {"type": "adaptive"}
    first = blocks(send([user]), stream)
    wanted = ["text", "tool_use"]
    assert first == ((["thinking", *wanted], None) if requested else (wanted, "Let me count. "))
    use = {"type": "tool_use", "id": "1", "name": "calculator", "input": {"expression": "12+7"}}
    said = {"role": "assistant", "content": [{"type": "text", "text": "Let me count. "}, use]}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "19"}]}
    cut = blocks(send([user, said, result], most=12), stream)
    assert cut == ((["thinking"], None) if requested else (["text"], ""))
    one, two = server.calls(attempt)
    assert one.choices[0].message["reasoning_content"] == "hm"
    before = one.prompt_token_ids + one.choices[0].token_ids
    assert two.prompt_token_ids[: len(before)] == before


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"thinking": {"type": "soon"}}, "thinking"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
        ({"tools": [{"name": "a", "input_schema": {}}], "tool_choice": {"type": "any"}}, "constrained"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "document"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}]},
            "image",
        ),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": []}]}, "messages"),
        ({"messages": [{"role": "user", "content": "JSON"}, {"role": "assistant", "content": "{"}]}, "prefill"),
        ({"system": 3}, "system"),
        ({"n": 2}, "n=2"),
    ],
)
def test_what_messages_can_not_have_is_refused(server, attempt, post, body, says):
    reply = post("/v1/messages", {**ASKED["/v1/messages"], **body})
    assert reply.status_code == 400
    assert reply.json()["error"]["type"] == "invalid_request_error"
    assert says in reply.json()["error"]["message"]
    assert says in server.calls(attempt)[0].error


def test_anthropics_key_header_opens_too(server, attempt, post):
    assert post("/v1/messages", ASKED["/v1/messages"], **{"x-api-key": server.key(attempt)}).status_code == 200
    assert post("/v1/messages", ASKED["/v1/messages"], **{"x-api-key": "lk-forged"}).status_code == 401
    both = {"x-api-key": server.key(attempt), "authorization": "Bearer lk-forged"}
    assert post("/v1/messages", ASKED["/v1/messages"], **both).status_code == 401


def test_tokens_are_counted_without_a_call(server, attempt, post):
    user = {"role": "user", "content": "hi"}
    counted = post("/v1/messages/count_tokens", {"messages": [user]}).json()
    said = {"role": "assistant", "content": "Hello."}
    longer = post("/v1/messages/count_tokens", {"messages": [user, said]}).json()
    assert longer["input_tokens"] > counted["input_tokens"]
    asked = post("/v1/messages", ASKED["/v1/messages"]).json()
    assert counted == {"input_tokens": asked["usage"]["input_tokens"]}
    assert len(server.calls(attempt)) == 1


def test_tokens_of_a_long_conversation_are_counted_while_others_are_answered(server, post, monkeypatch):
    counts, answered, encode = threading.Event(), threading.Event(), ByteTokenizer.encode

    def wait_and_encode(*given, **options):
        counts.set()
        assert answered.wait(60)
        return encode(*given, **options)

    monkeypatch.setattr(ByteTokenizer, "encode", wait_and_encode)
    with ThreadPoolExecutor() as threads:
        messages = [{"role": "user", "content": "hi " * 30_000}]
        counting = threads.submit(post, "/v1/messages/count_tokens", {"messages": messages})
        try:
            assert counts.wait(60)
            assert httpx.get(f"{server.url}/livez").status_code == 200
        finally:
            answered.set()
        assert counting.result().json()["input_tokens"] > 90_000


def test_tokens_of_what_no_context_holds_are_not_counted(server, post):
    body = {"messages": [{"role": "user", "content": "x" * (32 * server.engine.max_model_len)}]}
    refused = post("/v1/messages/count_tokens", body)
    assert refused.status_code == 400
    assert "maximum context length" in refused.json()["error"]["message"]


def test_embeddings_are_refused_by_an_engine_that_makes_none(server, attempt, client):
    with pytest.raises(openai.BadRequestError, match="makes no embeddings"):
        client.embeddings.create(model="policy", input="x")


def test_models_are_listed_and_looked_up(server, attempt, client):
    assert client.models.retrieve("policy").id == "policy"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("none")


def test_odd_bodies_are_refused_on_every_surface_and_never_a_500(server, attempt, post):
    odd = [{}, {"messages": 3}, {"messages": [3]}, {"input": [3]}, {"prompt": {}}, {"messages": [{"role": "user"}]}]
    odd += [{"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}], "max_tokens": 1}]
    odd += [{"input": [{"type": "function_call"}]}, {"input": [{"type": "function_call_output"}]}, {"input": [[]]}]
    odd += [{"input": [{"type": "message", "role": "user", "content": [[]]}]}, {"include": 3, "input": "x"}]
    odd += [{"tools": [3], "input": "x", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}]
    odd += [{"tool_choice": [], "input": "x", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}]
    odd += [{"stream": 1, "input": "x", "messages": [{"role": "user", "content": "x"}], "prompt": 1, "max_tokens": 1}]
    for path in PATHS:
        for body in odd:
            assert 400 <= post(path, body).status_code < 500, (path, body)


@pytest.mark.parametrize("size", [50, 400, 4000])
def test_an_attempt_can_not_push_the_responses_of_another_out(size):
    kept = Conversations(most_bytes=4000)
    kept.keep("resp_old", "small", [{"role": "user", "content": "x" * 50}])
    for number in range(100):
        kept.keep(f"resp_{number}", "large", [{"role": "user", "content": f"{number:02}" * (size // 2)}])
        assert kept._size <= 4000
    kept.keep("resp_new", "small", [{"role": "user", "content": "x" * 50}])
    assert all(kept.before(response_id, "small") for response_id in ("resp_old", "resp_new"))


def test_what_is_kept_of_responses_is_bounded_and_ends_with_the_attempt():
    kept = Conversations(most_bytes=5000)
    for number in range(100):
        items = [{"id": f"msg_{number}_0", "content": "y" * 50}]
        kept.keep(f"resp_{number}", f"attempt {number % 3}", [{"role": "user", "content": f"{number} x"}], items)
        assert kept._size <= 5000
    assert kept.before("resp_99", "attempt 0")[0]["content"] == "99 x"
    assert kept.resolve([{"type": "item_reference", "id": "msg_99_0"}], "attempt 0") == items
    with pytest.raises(Refusal):
        kept.before("resp_0", "attempt 0")
    with pytest.raises(Refusal):
        kept.resolve([{"type": "item_reference", "id": "msg_0_0"}], "attempt 0")
    for number in range(3):
        kept.forget(f"attempt {number}")
    assert kept._size == 0
    assert not kept._owned


def test_messages_that_responses_have_in_common_are_kept_once():
    kept = Conversations(most_bytes=10_000_000)
    said = {f"attempt {number}": [{"role": "user", "content": "x" * 500}] for number in range(64)}
    for turn in range(20):
        for owner, messages in said.items():
            references = [{"type": "item_reference", "id": f"msg_{turn_before}_0"} for turn_before in range(turn)]
            kept.resolve(references, owner)
            messages += [{"role": "assistant", "content": f"{turn}"}, {"role": "tool", "content": f"{turn}" * 4000}]
            kept.keep(f"resp_{turn}", owner, messages, [{"id": f"msg_{turn}_0", "content": f"{turn}"}])
    for owner, messages in said.items():
        assert kept.before("resp_19", owner) == messages
        assert kept.before("resp_3", owner) == messages[:9]


def test_a_response_that_was_dropped_for_other_attempts_is_the_servers_failure():
    kept = Conversations(most_bytes=5000)
    for number in range(6):
        kept.keep(f"resp_{number}", f"attempt {number}", [{"role": "user", "content": "x" * 500}], [])
    references = [{"type": "item_reference", "id": "msg_0_0"}]
    for ask in (lambda: kept.before("resp_0", "attempt 0"), lambda: kept.resolve(references, "attempt 0")):
        with pytest.raises(Refusal, match="Run fewer attempts at once") as refused:
            ask()
        assert (refused.value.status, refused.value.headers) == (503, {"x-should-retry": "false"})
    with pytest.raises(Refusal, match="is not known here") as unknown:
        kept.before("resp_9", "attempt 0")
    assert unknown.value.status == 400


def test_a_conversation_that_does_not_fit_next_to_others_is_the_servers_failure():
    kept = Conversations(most_bytes=10_000)
    for number in range(4):
        kept.keep(f"resp_{number}", f"attempt {number}", [{"role": "user", "content": "x" * 1500}], [])
    messages = [{"role": "user", "content": f"{number}" * 1500} for number in range(3)]
    for count in (1, 2, 3):
        kept.keep(f"resp_long_{count}", "long", messages[:count], [])
    with pytest.raises(Refusal, match="Run fewer attempts at once") as refused:
        kept.before("resp_long_3", "long")
    assert refused.value.status == 503


def test_the_messages_of_an_ended_attempt_refer_to_each_other_no_more():
    kept = Conversations()
    for count in (1, 2, 3):
        kept.keep(f"resp_{count}", "attempt", [{"role": "user", "content": f"{n}"} for n in range(count)], [])
    start = kept._owned["attempt"].start
    kept.forget("attempt")
    assert not start.after  # otherwise they would wait for a collection of cycles, which is rare in the server


def test_an_attempt_that_needs_the_memory_itself_loses_its_oldest_responses():
    kept = Conversations(most_bytes=2000)
    for number in range(3):
        kept.keep(f"resp_{number}", "attempt", [{"role": "user", "content": f"{number}" * 500}], [])
    assert kept.before("resp_2", "attempt")[0]["content"] == "2" * 500
    with pytest.raises(Refusal, match="is not known here") as refused:
        kept.before("resp_0", "attempt")
    assert refused.value.status == 400
