"""Model calls of plain code that sends them with httpx, or with a client made of it: recorded, named, rerouted."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json

import pytest

pytest.importorskip("openai")


from lightning_conformance.plugins.script import Reply
from lightning_conformance.plugins.server import ScriptedServer
from lightning_openai import patch
from lightning_openai.other_clients import OtherCall
from lightning_openai.reading.abandoned import abandoned
from lightning_openai.reading.anthropic_stream import message_of_events
from lightning_spans import Attempt, agent, use_attempt
from lightning_spans.chat.response import read_answer
from lightning_spans.record import unrecorded
from lightning_spans.record.recorder import SpanRecorder
from lightning_spans.record.tracing.tracers import make_tracer
from lightning_spans.schema import spans as names

BODY = {"model": "far", "messages": [{"role": "user", "content": "hello"}]}
SECRETS = {"authorization": "Bearer mine", "x-api-key": "mine", "cookie": "a=mine", "x-own": "mine"}
EVENTS = [
    {"type": "message_start", "message": {"type": "message", "id": "msg_1", "model": "far", "content": []}},
    {"type": "content_block_start", "index": 0, "content_block": {"type": "thinking", "thinking": ""}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "hm"}},
    {"type": "content_block_start", "index": 1, "content_block": {"type": "text", "text": ""}},
    {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "go"}},
    {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "od"}},
    {"type": "content_block_start", "index": 2, "content_block": {"type": "tool_use", "id": "t", "name": "add"}},
    {"type": "content_block_delta", "index": 2, "delta": {"type": "input_json_delta", "partial_json": '{"a":'}},
    {"type": "content_block_delta", "index": 2, "delta": {"type": "input_json_delta", "partial_json": " 1}"}},
    {"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": {"output_tokens": 7}},
    {"type": "message_stop"},
]  # fmt: skip


def chats(recorder, sink):
    recorder.tracer.flush(60)
    return [span for span in sink.spans if span.operation == names.CHAT]


def ask(library, url, *, at_once=True, path="/chat/completions", **more):
    async def post():
        async with library.AsyncClient(headers=SECRETS) as client:
            return (await client.post(f"{url}{path}?key=mine", json={**BODY, **more})).json()

    if not at_once:
        return asyncio.run(post())
    with library.Client(headers=SECRETS, auth=("me", "mine")) as client:
        return client.post(f"{url}{path}?key=mine", json={**BODY, **more}).json()


@pytest.mark.parametrize("at_once", [True, False])
def test_a_call_of_plain_httpx_is_one_span_with_its_agent_named_in_the_request(library, at_once, recorder, sink):
    with ScriptedServer() as server, agent("writer"):
        answer = ask(library, server.url, at_once=at_once)
    (span,), (request,) = chats(recorder, sink), server.requests
    assert (span.agent, span.status, span.attributes[names.FRAMEWORK]) == ("writer", "ok", library.__name__)
    assert span.attributes[names.RESPONSE_ID] == answer["id"]
    assert json.loads(span.attributes[names.REQUEST]) == BODY
    assert request.headers["traceparent"] == f"00-{span.trace_id}-{span.span_id}-01"
    assert request.headers["x-own"] == "mine"


@pytest.mark.parametrize("at_once", [True, False])
def test_the_call_of_an_agent_in_training_goes_to_the_policy_and_nothing_of_the_users_with_it(
    library, at_once, recorder, sink
):
    with ScriptedServer() as policy, ScriptedServer() as far:
        attempt = Attempt("r", "a", endpoint=policy.base, key="k", agents=("writer",), model="tuned")
        with use_attempt(attempt):
            with agent("writer"):
                ask(library, far.url, at_once=at_once)
            with agent("checker"):
                ask(library, far.url, at_once=at_once)
    (tuned,), (left,) = policy.requests, far.requests
    assert tuned.body == {**BODY, "model": "tuned"}
    assert (tuned.path, tuned.headers["authorization"]) == ("/v1/chat/completions", "Bearer k")
    assert tuned.headers["x-lightning-agent"] == "writer"
    assert "mine" not in json.dumps([tuned.headers, tuned.path])
    assert left.body == BODY
    first, second = chats(recorder, sink)
    span = f"00-{first.trace_id}-{first.span_id}-01"
    assert tuned.headers["traceparent"] == tuned.headers["x-lightning-traceparent"] == span
    assert "x-lightning-traceparent" not in left.headers
    assert [span.attributes.get(names.REROUTED) for span in (first, second)] == [True, None]


def test_integers_beyond_64_bits_go_to_the_policy_as_they_are(library, recorder, sink):
    used = {"type": "tool_use", "id": "t", "name": "factorial", "input": {"n": 51_090_942_171_709_440_001}}
    messages = [{"role": "assistant", "content": [used]}]
    with ScriptedServer() as policy:
        attempt = Attempt("r", "a", endpoint=policy.base, key="k", agents=("writer",), model="tuned")
        with use_attempt(attempt), agent("writer"):
            ask(library, "http://far/v1", messages=messages)
    assert policy.requests[0].body["messages"] == messages
    (span,) = chats(recorder, sink)
    assert json.loads(span.attributes[names.REQUEST])["messages"] == messages


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("at_once", [True, False])
def test_an_answer_of_the_policys_belongs_to_the_programs_own_request(library, at_once, stream, recorder):
    def asked(client, url):
        return client.build_request("POST", f"{url}/chat/completions", json={**BODY, "stream": stream})

    def sent(url):
        with library.Client(headers=SECRETS) as client:
            request = asked(client, url)
            with contextlib.closing(client.send(request, stream=stream)) as response:
                return request, response

    async def sent_async(url):
        async with library.AsyncClient(headers=SECRETS) as client:
            request = asked(client, url)
            async with contextlib.aclosing(await client.send(request, stream=stream)) as response:
                return request, response

    with ScriptedServer() as policy, ScriptedServer() as far:
        attempt = Attempt("r", "a", endpoint=policy.base, key="k", agents=("writer",), model="tuned")
        with use_attempt(attempt), agent("writer"):
            request, response = sent(far.url) if at_once else asyncio.run(sent_async(far.url))
    assert (len(policy.requests), far.requests) == (1, [])
    assert response.request is request
    assert (response.url, response.request.headers["x-own"]) == (request.url, "mine")


def test_a_stream_is_recorded_as_the_program_reads_it(library, recorder, sink):
    def read(url, most):
        with library.Client() as client, client.stream("POST", url, json={**BODY, "stream": True}) as response:
            for number, _ in enumerate(response.iter_lines()):
                if number == most:
                    return

    # The second is longer than what can arrive before its first line is read.
    with ScriptedServer(lambda body, seen: Reply("word " * (5000 if seen else 5))) as server:
        read(f"{server.url}/chat/completions", None)
        read(f"{server.url}/chat/completions", 0)
    assert abandoned.wait(60)  # a stream that was left is ended elsewhere
    whole, left = chats(recorder, sink)
    assert names.ABANDONED not in whole.attributes
    assert read_answer(whole.attributes[names.RESPONSE]).choices[0].message["content"] is not None
    assert left.attributes[names.ABANDONED]
    assert left.status == "ok"


def test_a_call_that_is_refused_or_finds_nobody_is_an_error(library, recorder, sink):
    with ScriptedServer(lambda body, seen: Reply("too much", status=429)) as server:
        ask(library, server.url)
    with pytest.raises(library.ConnectError):
        ask(library, server.url)
    refused, lost = chats(recorder, sink)
    assert (refused.status, refused.attributes["http.response.status_code"]) == ("error", 429)
    assert (lost.status, lost.attributes[names.ERROR_TYPE]) == ("error", "ConnectError")


def test_a_request_that_another_span_is_made_of_is_none_of_its_own(library, recorder, sink):
    with ScriptedServer() as server:
        OtherCall(recorder, "lightning_x", "x", lambda: BODY).called(
            lambda: ask(library, server.url), lambda body: body
        )
        importlib.import_module("openai").OpenAI(base_url=server.url, api_key="k").chat.completions.create(**BODY)
    assert len(chats(recorder, sink)) == 2


@pytest.mark.parametrize("at_once", [True, False])
def test_a_call_that_a_framework_reports_goes_to_the_policy_where_its_agent_is_in_training(
    library, at_once, recorder, sink
):
    with ScriptedServer() as policy, ScriptedServer() as far:
        attempt = Attempt("r", "a", endpoint=policy.base, key="k", agents=("writer",), model="tuned")
        with use_attempt(attempt):
            for name in ("writer", "checker"):
                with agent(name):
                    OtherCall(recorder, "lightning_x", "x", lambda: BODY).called(
                        lambda: ask(library, far.url, at_once=at_once), lambda body: body
                    )
    tuned, left = chats(recorder, sink)
    assert [(span.agent, span.attributes.get(names.REROUTED)) for span in (tuned, left)] == [
        ("writer", True), ("checker", None),
    ]  # fmt: skip
    (request,) = policy.requests
    assert request.headers["traceparent"] == f"00-{tuned.trace_id}-{tuned.span_id}-01"
    assert len(far.requests) == 1


def test_what_is_no_model_call_or_can_not_be_read_is_sent_as_it_is_and_the_latter_counted(library, recorder, sink):
    sent = []

    def answer(request):
        sent.append(dict(request.headers))
        return library.Response(200, json={})

    with library.Client(transport=library.MockTransport(answer)) as client:
        client.post("http://far/survey/responses", json=BODY)
        client.post("http://far/v1/embeddings", json=BODY)
        client.post("http://far/v1/chat/completions", content=iter([b"{}"]))
        client.post("http://far/v1/models/x:generateContent", json=BODY)
    assert chats(recorder, sink) == []
    assert len(sent) == 4
    assert all("traceparent" not in headers for headers in sent)
    assert unrecorded.take() == {"far/v1/chat/completions": 1, "far/v1/models/x:generateContent": 1}


SMS = {"message_type": "text", "channel": "sms", "from": "shop", "to": "447700900000", "text": "hello"}
MESSAGES = BODY["messages"]


@pytest.mark.parametrize(
    ("path", "body", "is_one"),
    [
        ("/v1/messages", SMS, False),
        ("/v1/messages", {"messages": [SMS]}, False),
        ("/v1/courses/completions", {"course": "python", "model": "far"}, False),
        ("/v1/chat/completions", {"model": "far", "messages": "all"}, False),
        ("/v1/responses", {"survey": "1", "input": "good"}, False),
        ("/openai/deployments/x/chat/completions", {"messages": MESSAGES}, True),
        ("/v1/agents/completions", {"agent_id": "x", "messages": MESSAGES}, True),  # Mistral's
        ("/v1/completions", {"prompt": "hello"}, True),
        ("/v1/responses", {"model": "far", "input": "hello"}, True),
        ("/v1/responses", {"prompt": {"id": "pmpt_1"}}, True),
    ],
)
def test_a_request_of_a_tools_goes_to_its_own_service_even_if_the_path_is_like_a_models(
    library, path, body, is_one, recorder, sink
):
    sent = []

    def answer(request):
        sent.append(json.loads(request.content))
        return library.Response(200, json={})

    with ScriptedServer() as policy, library.Client(transport=library.MockTransport(answer)) as client:
        attempt = Attempt("r", "a", endpoint=policy.base, key="k", agents=("writer",), model="tuned")
        with use_attempt(attempt), agent("writer"):
            client.post(f"http://far{path}", json=body)
    assert (len(policy.requests), sent) == ((1, []) if is_one else (0, [body]))
    assert len(chats(recorder, sink)) == is_one


def test_a_call_of_an_app_that_runs_in_a_clients_transport_is_recorded(library, recorder, sink):
    def answer(request):
        return library.Response(200, json={})

    async def app(scope, receive, send):
        with agent("writer"):
            async with library.AsyncClient(transport=library.MockTransport(answer)) as client:
                await client.post("http://far/v1/chat/completions", json=BODY)
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body"})

    async def use():
        async with library.AsyncClient(transport=library.ASGITransport(app)) as client:
            await client.post("http://app/agent")

    def use_at_once():  # as Starlette's TestClient does
        def run(request):
            with agent("writer"), library.Client(transport=library.MockTransport(answer)) as client:
                return client.post("http://far/v1/chat/completions", json=BODY)

        with library.Client(transport=library.MockTransport(run)) as client:
            client.post("http://app/agent")

    asyncio.run(use())
    use_at_once()
    assert [span.agent for span in chats(recorder, sink)] == ["writer", "writer"]


def test_a_message_of_anthropics_is_read_streamed_or_not(library, recorder, sink):
    whole = message_of_events(EVENTS)

    def answer(request):
        if json.loads(request.content).get("stream"):
            text = "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in EVENTS)
            return library.Response(200, text=text, headers={"content-type": "text/event-stream"})
        return library.Response(200, json=whole)

    client = library.Client(transport=library.MockTransport(answer))
    with agent("writer"):
        for stream in (False, True):
            client.post("http://far/v1/messages", json={**BODY, "max_tokens": 9, "stream": stream})
    for span in chats(recorder, sink):
        told = span.attributes
        assert (span.agent, told[names.PROVIDER], told[names.ENDPOINT]) == ("writer", "anthropic", "/messages")
        assert (told[names.RESPONSE_ID], told[names.FINISH_REASONS]) == ("msg_1", ["tool_calls"])
        (choice,) = read_answer(told[names.RESPONSE]).choices
        assert choice.message == {
            "role": "assistant",
            "content": "good",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "t", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}],
        }


def test_detach_ends_the_span_of_a_stream_that_is_still_read(library, sink):
    recorder = SpanRecorder(make_tracer("embedded", sink))
    undo = patch.bind(recorder)
    asked = {**BODY, "stream": True}
    with (
        ScriptedServer() as server,
        library.Client() as client,
        client.stream("POST", f"{server.url}/chat/completions", json=asked) as response,
    ):
        next(response.iter_lines())
        undo()
        (span,) = chats(recorder, sink)
        assert span.attributes[names.ABANDONED]
