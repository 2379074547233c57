"""The two halves of a call, made by the real wire and the real gateway: each call is one chat span."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import contextmanager
from dataclasses import replace

import httpx
import openai
import pytest

import lightning_openai
from lightning_openai import agent
from lightning_spans import Attempt, use_attempt
from lightning_spans.adapter.adapt import adapt
from lightning_spans.adapter.join import GATEWAY
from lightning_spans.adapter.nodes import MissingHalf
from lightning_spans.adapter.trace import count_joins
from lightning_spans.record.unrecorded import asked_by_training
from lightning_spans.schema.spans import FRAMEWORK
from lightning_spans.store.traces import traces_of
from lightning_trainer.gateway.http.serving import ServerThread
from support.fakes import FakeEngine, served

USER = [{"role": "user", "content": "What is 12+7?"}]
PROMPT = "12+7 ="
ELSEWHERE = "http://127.0.0.1:9/v1"
SPAN_HEADERS = (b"traceparent", b"x-lightning-traceparent")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with served(tmp_path_factory.mktemp("join"), FakeEngine()) as running:
        yield running


@pytest.fixture
def attempt(request, server):
    server.engine.play(())
    name = request.node.name
    return Attempt(f"rollout of {name}", name, endpoint=server.url, key=server.key(name), agents=("writer",))


@contextmanager
def proxy(url: str, dropped: Iterable[bytes], added: Iterable[tuple[bytes, bytes]] = ()):
    """A proxy before the gateway that drops and adds headers."""

    async def app(scope, receive, send):
        if scope["type"] != "http":
            while (message := await receive())["type"] != "lifespan.shutdown":
                await send({"type": f"{message['type']}.complete"})
            await send({"type": "lifespan.shutdown.complete"})
            return
        body = b""
        while (message := await receive())["type"] == "http.request":
            body += message["body"]
            if not message["more_body"]:
                break
        kept = [(k, v) for k, v in scope["headers"] if k not in {*dropped, b"host"}]
        async with httpx.AsyncClient() as http:
            with asked_by_training():  # not by the program: a proxy is a process of its own
                answer = await http.request(scope["method"], url + scope["path"], headers=[*kept, *added], content=body)
        lines = [(b"content-type", answer.headers["content-type"].encode())]
        await send({"type": "http.response.start", "status": answer.status_code, "headers": lines})
        await send({"type": "http.response.body", "body": answer.content})

    thread = ServerThread(app)
    try:
        yield thread.start()
    finally:
        thread.stop()


def trace_of(server, attempt):
    (trace,) = traces_of(server.store, attempt_ids=[attempt.attempt_id])
    return trace


def test_a_call_a_stream_and_one_that_is_left_are_one_chat_span_each(server, attempt):
    with lightning_openai.attach(), use_attempt(attempt):
        client = openai.OpenAI(base_url=ELSEWHERE, api_key="mine", max_retries=0)
        with agent("writer"):
            client.chat.completions.create(model="m", messages=USER)
            list(client.chat.completions.create(model="m", messages=USER, stream=True))
            server.engine.play(["long " * 200])
            for _ in (stream := client.chat.completions.create(model="m", messages=USER, stream=True)):
                break
            stream.close()
    assert len(server.recorded(attempt.attempt_id, 3)) == 3
    trace = trace_of(server, attempt)
    assert count_joins([trace]).joined == len(trace.chats) == 3
    assert trace.unjoined == ()
    assert {node.span.agent for node in trace.chats} == {"writer"}


async def complete(url, *, stream):
    async with openai.AsyncOpenAI(base_url=url, api_key="mine", max_retries=0) as client:
        answer = await client.completions.create(model="m", prompt=PROMPT, stream=stream, max_tokens=50, logprobs=0)
        return [chunk async for chunk in answer] if stream else [answer]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("in_loop", [False, True])
def test_a_text_completion_is_a_transition_with_the_tokens_of_the_engine(server, attempt, stream, in_loop):
    with lightning_openai.attach(), use_attempt(attempt):
        client = openai.OpenAI(base_url=ELSEWHERE, api_key="mine", max_retries=0)
        with agent("writer"):
            server.engine.play(["19"])
            if in_loop:
                told = asyncio.run(complete(ELSEWHERE, stream=stream))
            else:
                answer = client.completions.create(model="m", prompt=PROMPT, stream=stream, max_tokens=50, logprobs=0)
                told = list(answer) if stream else [answer]
        with agent("editor"), pytest.raises(openai.APIConnectionError):
            client.completions.create(model="m", prompt=PROMPT)  # is not trained, and so stays where it was
    assert "".join(part.choices[0].text for part in told if part.choices) == "19"
    (call,) = server.calls(attempt.attempt_id)
    trace = trace_of(server, attempt)
    made, stayed = adapt(trace)
    assert trace.chats[0].call == call
    assert (made.agent, made.response_id, made.finish_reason) == ("writer", told[0].id, "stop")
    assert made.tokens is not None
    assert made.tokens.prompt == tuple(PROMPT.encode())
    assert made.tokens.response == (*b"19", 257)
    assert (made.request["prompt"], made.message["content"]) == (PROMPT, "19")
    assert (stayed.agent, stayed.tokens) == ("editor", None)
    assert count_joins([trace]).unjoined == {MissingHalf.NOT_SEEN: 1}


def test_a_text_completion_without_traceparent_or_answer_is_joined_by_its_agent_and_prompt(server, attempt):
    """The client gave up before it knew the id; LangChain sends its one prompt as a list."""
    with proxy(server.url, SPAN_HEADERS) as url:
        server.engine.play([RuntimeError("broke")])
        with use_attempt(replace(attempt, endpoint=url)), lightning_openai.attach(), agent("writer"):
            client = openai.OpenAI(base_url=ELSEWHERE, api_key="mine", max_retries=0)
            with pytest.raises(openai.InternalServerError):
                client.completions.create(model="m", prompt=[PROMPT])
    (node,) = trace_of(server, attempt).chats
    assert [node.call] == server.calls(attempt.attempt_id)
    assert node.call.trace_id is None


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_tries_again_is_one_span_with_two_calls(server, attempt, stream):
    server.engine.play([RuntimeError("broke"), "19"])
    with lightning_openai.attach(), use_attempt(attempt):
        client = openai.OpenAI(base_url=ELSEWHERE, api_key="mine", max_retries=2)
        with agent("writer"):
            reply = client.chat.completions.create(model="m", messages=USER, stream=stream)
            text = "".join(c.choices[0].delta.content or "" for c in reply) if stream else None
            assert (text or reply.choices[0].message.content) == "19"
    failed, answered = server.calls(attempt.attempt_id)
    trace = trace_of(server, attempt)
    assert [node.call for node in trace.chats] == [answered]
    assert [(half.reason, half.call) for half in trace.unjoined] == [(MissingHalf.SPARE, failed)]
    assert count_joins([trace]).unjoined == {MissingHalf.SPARE: 1}


def test_tracing_that_replaces_traceparent_leaves_the_join_exact(server, attempt):
    """A proxy's, or that of the program's HTTP client: each try gets a span of its own."""
    theirs = (b"traceparent", f"00-{'1' * 32}-{'2' * 16}-01".encode())
    server.engine.play([RuntimeError("broke"), "19", RuntimeError("broke")])
    with proxy(server.url, [b"traceparent"], [theirs]) as url:
        client = openai.OpenAI(base_url=ELSEWHERE, api_key="mine", max_retries=1)
        with use_attempt(replace(attempt, endpoint=url)), lightning_openai.attach(), agent("writer"):
            client.chat.completions.create(model="m", messages=USER)
            with pytest.raises(openai.InternalServerError):
                client.with_options(max_retries=0).chat.completions.create(model="m", messages=USER)
    failed, answered, unanswered = server.calls(attempt.attempt_id)
    trace = trace_of(server, attempt)
    assert [node.call for node in trace.chats] == [answered, unanswered]
    assert [(half.reason, half.call) for half in trace.unjoined] == [(MissingHalf.SPARE, failed)]


@pytest.mark.parametrize("stream", [False, True])
def test_a_proxy_that_drops_the_spans_id_leaves_the_join_to_the_response_id(server, attempt, stream):
    with (
        proxy(server.url, SPAN_HEADERS) as url,
        use_attempt(replace(attempt, endpoint=url)),
        lightning_openai.attach(),
        agent("writer"),
    ):
        client = openai.OpenAI(base_url=ELSEWHERE, api_key="mine", max_retries=0)
        for _ in range(2):
            assert len(list(client.chat.completions.create(model="m", messages=USER, stream=stream))) > 1
    one, two = trace_of(server, attempt).chats
    assert [one.call, two.call] == server.calls(attempt.attempt_id)
    assert one.call.trace_id is None
    assert trace_of(server, attempt).unjoined == ()


def test_a_program_that_is_not_attached_is_known_by_its_key_and_header(server, attempt):
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=attempt.key)
    client.chat.completions.create(model="m", messages=USER, extra_headers={"x-lightning-agent": "shell"})
    client.chat.completions.create(model="m", messages=USER)
    named, nameless = trace_of(server, attempt).chats
    assert (named.span.agent, named.span.attempt_id) == ("shell", attempt.attempt_id)
    assert nameless.span.agent is None
    assert [half.reason for half in trace_of(server, attempt).unjoined] == [MissingHalf.NO_SPAN, MissingHalf.UNNAMED]


def test_calls_that_stay_where_they_were_are_told_as_such(server, attempt):
    with lightning_openai.attach(), use_attempt(attempt):
        client = openai.OpenAI(base_url=ELSEWHERE, api_key="mine", max_retries=0)
        with agent("editor"), pytest.raises(openai.APIConnectionError):
            client.chat.completions.create(model="m", messages=USER)
    counted = count_joins([trace_of(server, attempt)])
    assert (counted.calls, counted.joined, counted.unjoined) == (1, 0, {MissingHalf.NOT_SEEN: 1})
    assert counted.lines() == [
        "0 of 1 model calls are joined with the gateway's records",
        f"1 not joined: {MissingHalf.NOT_SEEN}",
    ]


def test_a_forged_traceparent_leaves_the_other_attempts_call_as_it_was(server, attempt):
    with lightning_openai.attach(), use_attempt(attempt):
        client = openai.OpenAI(base_url=ELSEWHERE, api_key="mine", max_retries=0)
        with agent("writer"):
            client.chat.completions.create(model="m", messages=USER)
    (own,) = trace_of(server, attempt).chats
    forged = {"traceparent": f"00-{own.span.trace_id}-{own.span.span_id}-01", "x-lightning-agent": "writer"}
    thief = openai.OpenAI(base_url=f"{server.url}/v1", api_key=server.key("thief"), default_headers=forged)
    thief.chat.completions.create(model="m", messages=USER)
    assert trace_of(server, attempt).chats[0].call == own.call
    assert trace_of(server, attempt).unjoined == ()
    (theirs,) = traces_of(server.store, attempt_ids=["thief"])[0].chats
    assert (theirs.span.attempt_id, theirs.span.attributes.get(FRAMEWORK)) == ("thief", GATEWAY)
