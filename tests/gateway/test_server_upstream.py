"""Calls that the gateway forwards: recorded with the upstream's tokens, given back without what nobody asked for."""

from __future__ import annotations

import asyncio
import json
import time

import httpx
import openai
import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from lightning_spans.schema.transitions import Transition
from lightning_spans.store import open_store
from lightning_trainer.gateway.app import create_app
from lightning_trainer.gateway.auth.keys import Keys
from lightning_trainer.gateway.http.serving import ServerThread
from lightning_trainer.gateway.settings import Routing
from lightning_trainer.gateway.upstream.upstream import Upstream
from lightning_trainer.policies import Policies
from lightning_trainer.rl.account import UntrainedReason
from lightning_trainer.rl.rows import why_untrainable
from support.fakes import Attempts, FakeEngine, run_attempt, served

USER = [{"role": "user", "content": "What is 12+7?"}]
TOOLS = [{"type": "function", "function": {"name": "calculator", "parameters": {"type": "object"}}}]
OPEN = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression":"12+7"}}\n</tool_call>'


@pytest.fixture(scope="module")
def behind(tmp_path_factory):
    """A server like ours, which speaks vLLM's dialect, as upstream."""
    with served(tmp_path_factory.mktemp("behind"), FakeEngine(model="tuned")) as running:
        yield running


@pytest.fixture(scope="module")
def front(tmp_path_factory, behind):
    upstreams = [
        Upstream("tuned", f"{behind.url}/v1", key=behind.keys.issue("admin")),
        Upstream("locked", f"{behind.url}/v1", key="wrong"),
        Upstream("nowhere", "http://127.0.0.1:9/v1"),
    ]
    routing = Routing(model="tuned", versions={"tuned": 4})
    with served(tmp_path_factory.mktemp("front"), upstreams=upstreams, routing=routing) as running:
        yield running


@pytest.fixture
def attempt(request, behind, front):
    behind.engine.play(())
    return request.node.name


@pytest.fixture
def client(front, attempt):
    with openai.OpenAI(base_url=f"{front.url}/v1", api_key=front.key(attempt), max_retries=0) as made:
        yield made


@pytest.mark.parametrize("stream", [False, True])
def test_a_forwarded_call_is_recorded_with_the_engines_own_tokens(front, behind, attempt, client, stream):
    behind.engine.play(["12+7 is 19", "12+7 is 20"])
    reply = client.chat.completions.create(model="tuned", messages=USER, n=2, temperature=0.5, stream=stream)
    chunks = list(reply) if stream else [reply]
    (call,) = front.calls(attempt)
    (source,) = [one for one in behind.store.calls() if one.response_id == call.response_id]
    for ours, theirs in zip(call.choices, source.choices, strict=True):
        assert (ours.token_ids, ours.logprobs) == (theirs.token_ids, theirs.logprobs)
        assert (ours.index, ours.finish_reason) == (theirs.index, theirs.finish_reason)
        assert ours.message["content"] == theirs.message["content"]
    assert call.prompt_token_ids == source.prompt_token_ids
    assert (call.policy, call.policy_version, call.error) == ("tuned", 4, None)
    assert call.sampling == {**OPEN, "temperature": 0.5, "n": 2}
    assert call.request["messages"] == USER
    for chunk in chunks:
        shown = chunk.model_dump()
        assert "prompt_token_ids" not in shown
        assert all("token_ids" not in choice and choice["logprobs"] is None for choice in shown["choices"])


@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls_of_an_upstream_are_on_record_as_the_agent_got_them(front, behind, attempt, client, stream):
    behind.engine.play([f"Let me count. {CALL}{CALL}"])
    if stream:
        with client.chat.completions.stream(model="tuned", messages=USER, tools=TOOLS) as events:
            message = events.get_final_completion().choices[0].message
    else:
        message = client.chat.completions.create(model="tuned", messages=USER, tools=TOOLS).choices[0].message
    recorded = front.calls(attempt)[0].choices[0].message
    assert recorded["content"] == message.content == "Let me count. "
    told = [(call.id, call.function.name, call.function.arguments) for call in message.tool_calls]
    kept = [(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in recorded["tool_calls"]]
    assert kept == told
    assert len(kept) == 2


def test_a_stream_of_a_completion_has_the_prompts_tokens_once_for_each_choice(behind, attempt):
    prompt = list(b"once upon a time")
    behind.engine.play(["a long answer", "another one"])
    body = {"model": "tuned", "prompt": prompt, "n": 2, "stream": True, "return_token_ids": True, "max_tokens": 20}
    headers = {"authorization": f"Bearer {behind.keys.issue('admin')}"}
    reply = httpx.post(f"{behind.url}/v1/completions", json=body, headers=headers, timeout=30)
    chunks = [json.loads(line[6:]) for line in reply.text.split("\n\n") if line.startswith("data: {")]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    for index in (0, 1):
        found = [choice for choice in choices if choice["index"] == index]
        assert len(found) > 2
        assert [choice["prompt_token_ids"] for choice in found if "prompt_token_ids" in choice] == [prompt]


def test_what_the_agent_asked_for_is_left_in(front, attempt, client):
    reply = client.chat.completions.create(
        model="tuned", messages=USER, logprobs=True, extra_body={"return_token_ids": True}
    )
    (call,) = front.calls(attempt)
    assert reply.prompt_token_ids == list(call.prompt_token_ids)
    assert [token.logprob for token in reply.choices[0].logprobs.content] == list(call.choices[0].logprobs)


def test_a_forced_temperature_is_forwarded_and_on_record(front, behind, attempt, client):
    routing = front.app.state.routing
    front.app.state.routing = Routing(model="tuned", temperature=1.0)
    try:
        client.chat.completions.create(model="tuned", messages=USER, temperature=0.1)
    finally:
        front.app.state.routing = routing
    assert front.calls(attempt)[0].sampling == {**OPEN, "temperature": 1.0, "temperature_asked": 0.1}
    assert behind.engine.samplings[-1].temperature == 1.0


def test_a_frozen_agents_calls_are_sampled_as_requested(front, attempt, client):
    routing = front.app.state.routing
    policies = Policies({"writer": "locked", "judge": "tuned"}, frozenset({"tuned"}))
    front.app.state.routing = Routing(temperature=1.0, plain=True, policies=policies)
    try:
        client.chat.completions.create(
            model="x", messages=USER, temperature=0.1, top_p=0.2, extra_headers={"x-lightning-agent": "judge"}
        )
    finally:
        front.app.state.routing = routing
    assert front.calls(attempt)[0].sampling == {**OPEN, "temperature": 0.1, "top_p": 0.2}


def test_the_upstreams_refusals_come_back_as_they_are(front, attempt, client):
    with pytest.raises(openai.BadRequestError, match="presence_penalty") as refused:
        client.chat.completions.create(model="tuned", messages=USER, presence_penalty=1.0)
    assert refused.value.code == "unsupported_parameter"
    assert "presence_penalty" in front.calls(attempt)[0].error


def test_agents_keys_never_reach_the_upstream(front, attempt, client):
    with pytest.raises(openai.AuthenticationError):  # the agent's own key would not help there either
        client.chat.completions.create(model="locked", messages=USER)
    assert front.calls(attempt)[0].error


def test_an_upstream_that_is_not_there_is_a_502_that_names_it(front, attempt, client):
    with pytest.raises(openai.InternalServerError, match=r"127\.0\.0\.1:9") as failed:
        client.chat.completions.create(model="nowhere", messages=USER)
    assert failed.value.status_code == 502
    assert "127.0.0.1:9" in front.calls(attempt)[0].error


def test_all_models_are_listed_and_both_ways_serve(front, attempt, client):
    assert {model.id for model in client.models.list()} == {"policy", "tuned", "locked", "nowhere"}
    client.chat.completions.create(model="policy", messages=USER)
    client.chat.completions.create(model="something else", messages=USER)
    assert [call.policy for call in front.calls(attempt)] == ["policy", "tuned"]


def test_another_servers_calls_are_forwarded_as_they_are_and_recorded_without_tokens(tmp_path):
    seen = []

    async def chat(request):
        seen.append((await request.json(), dict(request.headers)))
        message = {"role": "assistant", "content": "19", "reasoning_content": "hm"}
        return JSONResponse({"id": "x-1", "choices": [{"index": 0, "finish_reason": "stop", "message": message}]})

    with _upstream(tmp_path, chat, owner="somebody") as front:
        body = {"model": "m", "messages": USER, "response_format": {"type": "json_object"}, "presence_penalty": 1}
        headers = {
            "authorization": f"Bearer {front.key('a')}",
            "traceparent": "00-" + "a" * 32 + "-" + "b" * 16 + "-01",
            "x-lightning-traceparent": "00-" + "c" * 32 + "-" + "d" * 16 + "-01",
        }
        reply = httpx.post(f"{front.url}/v1/chat/completions", json=body, headers=headers)
        assert reply.json()["choices"][0]["message"]["content"] == "19"
        (call,) = front.calls("a")
    ((forwarded, sent),) = seen
    assert forwarded == body
    assert "Bearer" not in str(sent)
    assert "traceparent" not in str(sent)
    assert (call.trace_id, call.span_id) == ("c" * 32, "d" * 16)
    assert (call.prompt_token_ids, call.choices[0].token_ids, call.choices[0].logprobs) == (None, None, None)
    assert call.choices[0].message == {"role": "assistant", "content": "19", "reasoning_content": "hm"}
    assert call.response_id == "x-1"


def test_events_cut_anywhere_are_put_together(tmp_path):
    async def chat(request):
        events = [{"id": "x", "choices": [{"index": 0, "delta": {"content": letter}}]} for letter in "größer"]
        events.append({"id": "x", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        text = ": a comment\r\n\r\n" + "".join(f"data: {json.dumps(e, ensure_ascii=False)}\r\n\r\n" for e in events)
        data = text.encode() + b"data: [DONE]\r\n\r\n"

        async def pieces():
            for start in range(0, len(data), 7):
                yield data[start : start + 7]
                await asyncio.sleep(0)

        return StreamingResponse(pieces(), media_type="text/event-stream")

    with _upstream(tmp_path, chat) as front:
        client = openai.OpenAI(base_url=f"{front.url}/v1", api_key=front.key("a"))
        chunks = list(client.chat.completions.create(model="m", messages=USER, stream=True))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "größer"
        assert front.calls("a")[0].choices[0].message["content"] == "größer"


_OUT_OF_MEMORY = b'data: {"error": {"message": "out of memory", "code": 500}}\n\n'


@pytest.mark.parametrize("ending", [b"", _OUT_OF_MEMORY, b"data: {\n\n"])
def test_a_stream_that_breaks_off_is_an_error_with_what_came_on_record(tmp_path, ending):
    async def chat(request):
        chunk = {"choices": [{"index": 0, "delta": {"content": "12"}, "token_ids": [5], "finish_reason": None}]}

        async def pieces():
            yield b"data: " + json.dumps(chunk).encode() + b"\n\n"
            yield ending

        return StreamingResponse(pieces(), media_type="text/event-stream")

    with _upstream(tmp_path, chat) as front:
        client = openai.OpenAI(base_url=f"{front.url}/v1", api_key=front.key("a"))
        with pytest.raises(openai.APIError):
            list(client.chat.completions.create(model="m", messages=USER, stream=True))
        (call,) = front.calls("a")
        assert call.error
        assert call.choices[0].message["content"] == "12"
        assert (call.choices[0].token_ids, call.choices[0].finish_reason) == ((5,), None)


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (429, '{"error": {"message": "slow down", "type": "rate", "code": "rate_limit"}}', "slow down"),
        (400, '{"object": "error", "message": "too long", "code": 400}', "too long"),
        (500, "<html>broken</html>", "broken"),
        (200, "not json", "no JSON"),
        (200, "[]", "no JSON object"),
    ],
)
def test_an_upstreams_error_keeps_its_status_and_message(tmp_path, status, body, message):
    async def chat(request):
        return Response(body, status, {"retry-after": "3"})

    with _upstream(tmp_path, chat) as front:
        headers = {"authorization": f"Bearer {front.key('a')}"}
        reply = httpx.post(f"{front.url}/v1/chat/completions", json={"model": "m", "messages": USER}, headers=headers)
        assert reply.status_code == (502 if status == 200 else status)
        assert message in reply.json()["error"]["message"]
        assert reply.headers.get("retry-after") == (None if status == 200 else "3")
        assert message in front.calls("a")[0].error


def test_logprobs_that_do_not_fit_the_tokens_are_not_used(tmp_path):
    async def chat(request):
        choice = {"index": 0, "message": {"content": "x"}, "finish_reason": "stop", "token_ids": [1, 2]}
        choice["logprobs"] = {"content": [{"token": "x", "logprob": -1.0}]}
        return JSONResponse({"choices": [choice], "prompt_token_ids": [7]})

    with _upstream(tmp_path, chat) as front:
        headers = {"authorization": f"Bearer {front.key('a')}"}
        httpx.post(f"{front.url}/v1/chat/completions", json={"model": "m", "messages": USER}, headers=headers)
        (choice,) = front.calls("a")[0].choices
        assert (choice.token_ids, choice.logprobs) == ((1, 2), None)


@pytest.mark.parametrize("stream", [False, True])
def test_replies_and_requests_may_hold_what_strict_json_does_not(tmp_path, stream):
    said = '"tool_calls":[{"index":0,"id":"c","function":{"name":"f","arguments":"{}"}}],"content":"half \\ud83d"'
    odd = f'"id":"x","prompt_token_ids":[7],"big":{2**70},"choices":[{{"index":0,"%s":{{{said}}},"token_ids":[1],'
    odd += '"logprobs":{"content":[{"token":"x","logprob":-Infinity}]},"finish_reason":"stop"}]'

    async def chat(request):
        assert (await request.json())["messages"][0]["content"] == "asked \ufffd"
        if stream:
            return Response(f"data: {{{odd % 'delta'}}}\n\ndata: [DONE]\n\n", media_type="text/event-stream")
        return Response(f"\ufeff{{{odd % 'message'}}}", media_type="application/json")

    schema = f'{{"type":"object","properties":{{"x":{{"maximum":{2**70}}}}}}}'
    tools = f'[{{"type":"function","function":{{"name":"f","parameters":{schema}}}}}]'
    asked = f'{{"model":"m","stream":{str(stream).lower()},"messages":[{{"role":"user","content":"asked \\ud83d"}}]'
    with _upstream(tmp_path, chat) as front:
        headers = {"authorization": f"Bearer {front.key('a')}"}
        url = f"{front.url}/v1/chat/completions"
        reply = httpx.post(url, content=f'{asked},"tools":{tools}}}'.encode(), headers=headers)
        assert reply.status_code == 200, reply.text
        assert "half \ufffd" in reply.text.replace("\\ufffd", "\ufffd")
        assert str(2**70) in reply.text
        (call,) = front.calls("a")
        assert call.request["tools"][0]["function"]["parameters"]["properties"]["x"]["maximum"] == 2**70
        assert (call.choices[0].token_ids, call.choices[0].logprobs) == ((1,), None)
        refused = httpx.post(url, content=f'{asked},"temperature":NaN}}'.encode(), headers=headers)
    assert (refused.status_code, "temperature=nan: must be a finite number" in refused.text) == (400, True)


def _streamed(*chunks):
    async def chat(request):
        body = await request.json()
        counts = body.get("stream_options", {}).get("include_usage")
        sent = [chunk for chunk in chunks if counts or chunk["choices"]]
        text = "".join(f"data: {json.dumps({'id': 'x', **chunk})}\n\n" for chunk in sent) + "data: [DONE]\n\n"
        return Response(text, media_type="text/event-stream")

    return chat


def _piece(delta, ids=(), **more):
    content = [{"token": "x", "logprob": -0.5} for _ in ids]
    choice = {"index": 0, "delta": delta, "token_ids": list(ids), "logprobs": {"content": content}, **more}
    return {"choices": [choice], "usage": None}


@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("reported", [4, 9])
def test_tokens_are_kept_only_if_the_ids_of_all_of_them_came(tmp_path, reported, asks):
    usage = {"prompt_tokens": 3, "completion_tokens": reported, "total_tokens": 3 + reported}
    chunks = [_piece({"content": "ab"}, [1, 2]), _piece({"content": "c"}, [3]), _piece({}, [4], finish_reason="stop")]
    options = {"stream_options": {"include_usage": True}} if asks else {}
    with _upstream(tmp_path, _streamed(*chunks, {"choices": [], "usage": usage})) as front:
        client = openai.OpenAI(base_url=f"{front.url}/v1", api_key=front.key("a"))
        got = list(client.chat.completions.create(model="m", messages=USER, stream=True, **options))
        (call,) = front.calls("a")
    told = [chunk.usage.completion_tokens for chunk in got if chunk.usage]
    assert told == ([reported] if asks else []), "an agent gets the counts if it asked for them, and no empty chunk"
    assert all(chunk.choices for chunk in got) is not asks
    assert call.choices[0].message["content"] == "abc"
    assert call.choices[0].token_ids == ((1, 2, 3, 4) if reported == 4 else None)
    assert (call.choices[0].logprobs is None) is (reported == 9)
    made = Transition(rollout_id="r", attempt_id="a", agent="x", turn=0, span_id="s", sampling=call.sampling)
    assert why_untrainable(made) == (UntrainedReason.NO_TOKENS if reported == 4 else UntrainedReason.PARTIAL_TOKENS)


@pytest.mark.parametrize("path", ["responses", "messages"])
def test_calls_that_an_upstream_streams_under_one_index_are_calls_of_their_own(tmp_path, path):
    functions = [{"name": "calculator", "arguments": f'{{"x":{at}}}'} for at in (0, 1)]
    calls = [{"index": 0, "id": f"c{at}", "function": function} for at, function in enumerate(functions)]
    chunks = [_piece({"tool_calls": [call]}, [1]) for call in calls]
    parameters = {"type": "object"}
    body = {
        "responses": {"input": "hi", "tools": [{"type": "function", "name": "calculator", "parameters": parameters}]},
        "messages": {
            "messages": USER,
            "max_tokens": 9,
            "tools": [{"name": "calculator", "input_schema": parameters}],
        },
    }[path]
    with _upstream(tmp_path, _streamed(*chunks, _piece({}, [2], finish_reason="tool_calls"))) as front:
        headers = {"authorization": f"Bearer {front.key('a')}"}
        reply = httpx.post(f"{front.url}/v1/{path}", json={"model": "m", "stream": True, **body}, headers=headers)
        (call,) = front.calls("a")
    kept = [(made["id"], made["function"]["arguments"]) for made in call.choices[0].message["tool_calls"]]
    assert kept == [("c0", '{"x":0}'), ("c1", '{"x":1}')]
    begun = "response.output_item.added" if path == "responses" else "content_block_start"
    assert reply.text.count(f"event: {begun}") == 2


def test_a_client_that_goes_away_ends_the_upstreams_work_too(tmp_path):
    gone = []

    async def chat(request):
        async def pieces():
            try:
                while True:
                    yield b'data: {"choices": [{"index": 0, "delta": {"content": "x"}}]}\n\n'
                    await asyncio.sleep(0.01)
            finally:
                gone.append(True)

        return StreamingResponse(pieces(), media_type="text/event-stream")

    with _upstream(tmp_path, chat) as front:
        headers = {"authorization": f"Bearer {front.key('a')}"}
        body = {"model": "m", "messages": USER, "stream": True}
        with httpx.stream("POST", f"{front.url}/v1/chat/completions", json=body, headers=headers) as reply:
            next(reply.iter_lines())
        until = time.monotonic() + 60
        while not (gone and front.calls("a")):
            assert time.monotonic() < until
            time.sleep(0.02)
        assert front.calls("a")[0].error == "client cut the connection"


TOO_MANY = "'max_tokens' is too large: 32000 > 32768 - 20000"


@pytest.mark.parametrize("stream", [False, True])
def test_a_limit_that_messages_demand_is_left_out_where_the_upstream_refuses_it(tmp_path, stream):
    limits = []

    async def chat(request):
        limits.append((await request.json()).get("max_tokens"))
        if limits[-1] is not None:
            return JSONResponse({"error": {"message": TOO_MANY}}, 400)
        chunk = {"choices": [{"index": 0, "delta": {"content": "19"}, "finish_reason": "stop"}]}
        events = f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n"
        return Response(events, media_type="text/event-stream") if stream else JSONResponse(chunk)

    with _upstream(tmp_path, chat) as front:
        body = {"model": "m", "messages": USER, "max_tokens": 32_000, "stream": stream}
        headers = {"authorization": f"Bearer {front.key('a')}"}
        reply = httpx.post(f"{front.url}/v1/messages", json=body, headers=headers)
        assert reply.status_code == 200, reply.text
        assert "19" in reply.text
        (call,) = front.calls("a")
        assert limits == [32_000, None]
        assert call.sampling["left_out"] == {"max_tokens": 32_000}
        assert "max_tokens" not in call.sampling
        chat_reply = httpx.post(f"{front.url}/v1/chat/completions", json=body, headers=headers)
        assert (chat_reply.status_code, chat_reply.json()["error"]["message"]) == (400, TOO_MANY)
        assert limits[2:] == [32_000]  # this form demands no limit: who gives one means it


def test_what_is_refused_without_a_limit_too_is_told_and_recorded_as_it_was_asked(tmp_path):
    said = []

    async def chat(request):
        said.append(f"no, {len(said)}")
        return JSONResponse({"error": {"message": said[-1]}}, 400)

    with _upstream(tmp_path, chat) as front:
        body = {"model": "m", "messages": USER, "max_tokens": 32_000}
        reply = httpx.post(f"{front.url}/v1/messages", json=body, headers={"authorization": f"Bearer {front.key('a')}"})
        assert (reply.status_code, reply.json()["error"]["message"]) == (400, "no, 0")
        (call,) = front.calls("a")
        assert (call.sampling["max_tokens"], call.error, len(said)) == (32_000, "no, 0", 2)
        assert "left_out" not in call.sampling


def test_fields_for_a_vendors_accounts_are_left_out_of_what_a_model_server_gets(tmp_path):
    seen = []

    async def chat(request):
        seen.append(await request.json())
        return JSONResponse({"choices": [{"index": 0, "message": {"content": "19"}, "finish_reason": "stop"}]})

    with _upstream(tmp_path, chat) as front:
        body = {"model": "m", "messages": USER, "provider": {"sort": "price"}, "prompt_cache_options": {"ttl": "24h"}}
        headers = {"authorization": f"Bearer {front.key('a')}"}
        reply = httpx.post(f"{front.url}/v1/chat/completions", json=body, headers=headers)
        assert reply.status_code == 200, reply.text
    assert not seen[0].keys() & {"provider", "prompt_cache_options"}


class _upstream:
    """A gateway before a scripted server."""

    def __init__(self, folder, chat, *, owner="vllm"):
        async def models(request):
            return JSONResponse({"object": "list", "data": [{"id": "m", "owned_by": owner}]})

        routes = [Route("/v1/chat/completions", chat, methods=["POST"]), Route("/v1/models", models)]
        self._behind = ServerThread(Starlette(routes=routes))
        self._store = open_store(str(folder / "front.db"))
        self._keys = Keys.fresh()

    def __enter__(self):
        upstream = Upstream("m", f"{self._behind.start()}/v1")
        self._app = create_app(Attempts(self._store), keys=self._keys, upstreams=[upstream])
        self._server = ServerThread(self._app)
        self.url = self._server.start()
        return self

    def __exit__(self, *exc):
        self._server.stop()
        self._behind.stop()
        self._store.close()

    def key(self, attempt_id):
        run_attempt(self._app, attempt_id)
        return self._keys.issue("attempt", rollout_id="r", attempt_id=attempt_id, fence=1)

    def calls(self, attempt_id):
        return self._store.calls(attempt_ids=[attempt_id])
