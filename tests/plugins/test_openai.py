from __future__ import annotations

import asyncio
import copy
import gc
import gzip
import json
import os
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import NamedTuple
from urllib.parse import unquote

import openai
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from openai._base_client import SyncAPIClient
from pydantic import BaseModel, ValidationError

import lightning_openai
from lightning_conformance.plugins.script import Reply, ScriptedToolCall, answer, pieces
from lightning_conformance.plugins.server import ScriptedServer
from lightning_conformance.plugins.suite import MODEL, PROMPTS, REPLAYS, TIMEOUT_S, PluginConformance, instructions
from lightning_openai import agent, patch, reroute
from lightning_openai.attributes import response_attributes
from lightning_openai.call import endpoint_of, unfinished
from lightning_openai.events import is_whole, read_events
from lightning_openai.reading.abandoned import abandoned
from lightning_spans import Attempt, open_store, use_attempt
from lightning_spans.chat.stream import put_together
from lightning_spans.record.recorder import SpanRecorder
from lightning_spans.record.tracing.tracers import TRACERS, make_tracer
from lightning_spans.schema import spans as names
from support.fake_sink import ListSink


def ask(url, name, prompt, *, client=None, **options):
    client = client or openai.OpenAI(base_url=url)
    messages = [{"role": "system", "content": instructions(name)}, {"role": "user", "content": prompt}]
    return client.chat.completions.create(model=MODEL, messages=messages, **options)


def respond(url, prompt, **options):
    client = openai.OpenAI(base_url=url)
    return client.responses.create(model=MODEL, instructions=instructions("writer"), input=prompt, **options)


async def ask_async(client, name, prompt, **options):
    messages = [{"role": "system", "content": instructions(name)}, {"role": "user", "content": prompt}]
    return await client.chat.completions.create(model=MODEL, messages=messages, **options)


def text_of(completion):
    return completion.choices[0].message.content


class TestConformance(PluginConformance):
    framework = "openai"
    tracers = TRACERS
    unsupported = dict.fromkeys(
        ["tool_call", "parallel_tools", "tool_error", "unknown_tool", "unreadable_arguments", "nested", *REPLAYS],
        "the openai client runs no tools",
    )

    def patched(self):
        return [(owner, name) for owner, name, _ in patch._PATCHES]

    def one_agent(self, url):
        with agent("writer"):
            return text_of(ask(url, "writer", PROMPTS["one_agent"]))

    def unnamed(self, url):
        with agent("writer"):
            return text_of(ask(url, "writer", PROMPTS["unnamed"]))

    def several_agents(self, url):
        client = openai.OpenAI(base_url=url)
        output = []
        for name in ("writer", "rewriter", "writer_2"):
            with agent(name):
                output.append(text_of(ask(url, name, PROMPTS["several_agents"], client=client)))
        return output

    def namesakes(self, url):
        output = []
        for team in ("red", "blue"):
            with agent(team), agent("writer"):
                output.append(text_of(ask(url, "writer", PROMPTS["namesakes"])))
        return output

    def responses(self, url):
        with agent("writer"):
            return respond(url, PROMPTS["responses"]).output_text

    def responses_streaming(self, url):
        with agent("writer"):
            return [event.model_dump() for event in respond(url, PROMPTS["responses_streaming"], stream=True)]

    def choices(self, url):
        with agent("writer"):
            return [choice.message.content for choice in ask(url, "writer", PROMPTS["choices"], n=2).choices]

    def streaming(self, url):
        with agent("writer"):
            chunks = ask(url, "writer", PROMPTS["streaming"], stream=True)
            return [chunk.model_dump() for chunk in chunks]

    def abandoned(self, url):
        with agent("writer"):
            return next(ask(url, "writer", PROMPTS["abandoned"], stream=True)).id

    def parallel(self, url):
        def work(name):
            with agent(name):
                return text_of(ask(url, name, PROMPTS["parallel"]))

        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(work, ["left", "right"]))

    async def asynchronous(self, url):
        async with openai.AsyncOpenAI(base_url=url) as client:

            async def work(name):
                with agent(name):
                    return text_of(await ask_async(client, name, PROMPTS["asynchronous"]))

            return await asyncio.gather(work("writer"), work("rewriter"))

    async def awaited(self, url):
        async with openai.AsyncOpenAI(base_url=url) as client:
            with agent("writer"):
                return text_of(await ask_async(client, "writer", PROMPTS["awaited"]))

    def threads(self, url):
        with agent("writer"), ThreadPoolExecutor(2) as pool:
            return [text_of(a) for a in pool.map(lambda n: ask(url, "writer", f"hello {n}"), range(2))]

    def retried(self, url):
        with agent("writer"):
            return text_of(ask(url, "writer", PROMPTS["retried"]))

    def failed(self, url):
        with agent("writer"), pytest.raises(openai.InternalServerError) as error:
            ask(url, "writer", PROMPTS["failed"], client=openai.OpenAI(base_url=url, max_retries=0))
        return str(error.value)

    def slow(self, url):
        client = openai.OpenAI(base_url=url, max_retries=0, timeout=TIMEOUT_S)
        with agent("writer"), pytest.raises(openai.APITimeoutError) as error:
            ask(url, "writer", PROMPTS["slow"], client=client)
        return str(error.value)

    def cut(self, url):
        read = []
        with agent("writer"):
            chunks = ask(url, "writer", PROMPTS["cut"], stream=True)
            with pytest.raises(Exception) as error:  # noqa: PT011 - which one depends on the version
                read.extend(chunk.model_dump() for chunk in chunks)
        return [read, type(error.value).__name__]

    def heard_by_hooks_of_a_stream(self, url):
        seen = []
        hooks = {
            "request": [lambda request: seen.append(request.content.decode())],
            "response": [lambda response: seen.append(response.status_code)],
        }
        client = openai.OpenAI(base_url=url, http_client=openai.DefaultHttpxClient(event_hooks=hooks))
        with agent("writer"):
            return [*map(str, ask(url, "writer", PROMPTS["streaming"], client=client, stream=True)), seen]

    async def heard_by_asynchronous_hooks(self, url):
        seen = []

        async def hear_request(request):
            seen.append(request.content.decode())

        async def hear_response(response):
            seen.append((await response.aread()).decode())

        hooks = {"request": [hear_request], "response": [hear_response]}
        client = openai.AsyncOpenAI(base_url=url, http_client=openai.DefaultAsyncHttpxClient(event_hooks=hooks))
        with agent("writer"):
            await ask_async(client, "writer", PROMPTS["one_agent"])
            prompted = {"model": MODEL, "input": PROMPTS["responses"], "instructions": instructions("writer")}
            await client.responses.create(**prompted)
        return seen

    def heard_by_hooks(self, url):
        seen = []
        hooks = {
            "request": [lambda request: seen.append(request.content.decode())],
            "response": [lambda response: seen.append(response.read().decode())],
        }
        client = openai.OpenAI(base_url=url, http_client=openai.DefaultHttpxClient(event_hooks=hooks))
        with agent("writer"):
            return [text_of(ask(url, "writer", PROMPTS["one_agent"], client=client)), seen]


MESSAGES = [{"role": "system", "content": instructions("writer")}, {"role": "user", "content": "hello there"}]
http = sys.modules[
    openai.DefaultHttpxClient.__mro__[1].__module__.partition(".")[0]
]  # httpx, or httpx2 for openai >= 3


class Recorded(NamedTuple):
    server: ScriptedServer
    client: openai.OpenAI
    sink: ListSink
    recorder: SpanRecorder


@pytest.fixture
def wired():
    """A client, its server, and the spans of its calls. The client is older than the patch."""
    sink = ListSink()
    recorder = SpanRecorder(make_tracer("embedded", sink))
    with ScriptedServer() as server, openai.OpenAI(base_url=server.url, api_key="sk-user") as client:
        undo = patch.bind(recorder)
        yield Recorded(server, client, sink, recorder)
        undo()


def only(wired):
    """The one span and the one request there must be."""
    abandoned.wait(60)
    (span,) = wired.sink.spans
    (request,) = wired.server.requests
    assert request.headers["traceparent"] == f"00-{span.trace_id}-{span.span_id}-01"
    assert json.loads(span.attributes[names.REQUEST]) == request.body
    return span, request


def check_whole(wired):
    span, request = only(wired)
    assert json.loads(span.attributes[names.RESPONSE]) == request.answer
    assert span.attributes[names.RESPONSE_ID] == request.answer["id"]
    assert names.ABANDONED not in span.attributes
    assert span.status == "ok"
    assert not unfinished
    return span


def settle():
    for _ in range(4):
        gc.collect()


# Every way to call


class Answer(BaseModel):
    sum: int


def _stream_helper(client):
    with client.chat.completions.stream(model=MODEL, messages=MESSAGES) as events:
        return [event.type for event in events]


def _raw_stream(client):
    with client.chat.completions.with_streaming_response.create(model=MODEL, messages=MESSAGES, stream=True) as answer:
        return list(answer.iter_lines())


def _late(method):
    def call(client):
        with client.chat.completions.with_streaming_response.create(model=MODEL, messages=MESSAGES) as answer:
            result = getattr(answer, method)()
            return list(result) if method.startswith("iter") else result

    return call


def _response_stream(client):
    with client.responses.stream(model=MODEL, input="hello there") as events:
        return [event.type for event in events]


def _late_completion(client):
    with client.completions.with_streaming_response.create(model=MODEL, prompt=TEXT) as answer:
        return answer.json()


TEXT = f"{instructions('writer')} hello there"
WAYS = {
    "create": lambda c: c.chat.completions.create(model=MODEL, messages=MESSAGES),
    "parse": lambda c: c.chat.completions.parse(
        model=MODEL, messages=[{"role": "user", "content": 'say {"sum": 3}'}], response_format=Answer
    ),
    "choices": lambda c: c.chat.completions.create(model=MODEL, messages=MESSAGES, n=3, logprobs=True),
    "raw": lambda c: c.chat.completions.with_raw_response.create(model=MODEL, messages=MESSAGES).parse(),
    "stream": lambda c: list(c.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)),
    "stream of choices": lambda c: list(
        c.chat.completions.create(
            model=MODEL, messages=MESSAGES, stream=True, n=2, logprobs=True, stream_options={"include_usage": True}
        )
    ),
    "stream of tool calls": lambda c: list(
        c.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": 'call a {"x": 1}\ncall b {"y": "z z"}'}], stream=True
        )
    ),
    "stream helper": _stream_helper,
    "raw stream": lambda c: list(
        c.chat.completions.with_raw_response.create(model=MODEL, messages=MESSAGES, stream=True).parse()
    ),
    "lines of a stream": _raw_stream,
    **{f"late {method}": _late(method) for method in ("read", "json", "text", "parse", "iter_bytes", "iter_lines")},
    "post": lambda c: c.post("/chat/completions", body={"model": MODEL, "messages": MESSAGES}, cast_to=object),
    "absolute": lambda c: c.post(
        f"{c.base_url}chat/completions", body={"model": MODEL, "messages": MESSAGES}, cast_to=object
    ),
    "extra body": lambda c: c.chat.completions.create(model=MODEL, messages=MESSAGES, extra_body={"top_k": 5}),
    "responses": lambda c: c.responses.create(model=MODEL, input="hello there", instructions=instructions("writer")),
    "responses tool": lambda c: c.responses.create(model=MODEL, input='call a {"x": 1}'),
    "responses stream": lambda c: list(c.responses.create(model=MODEL, input="hello there", stream=True)),
    "responses tool stream": lambda c: list(c.responses.create(model=MODEL, input='call a {"x": 1}', stream=True)),
    "responses stream helper": _response_stream,
    "completion": lambda c: c.completions.create(model=MODEL, prompt=TEXT, logprobs=1),
    "completion of tokens": lambda c: c.completions.create(model=MODEL, prompt=[1, 2, 3]),
    "completion choices": lambda c: c.completions.create(model=MODEL, prompt=TEXT, n=3),
    "completion raw": lambda c: c.completions.with_raw_response.create(model=MODEL, prompt=TEXT).parse(),
    "completion late": _late_completion,
    "completion stream": lambda c: list(c.completions.create(model=MODEL, prompt=TEXT, stream=True)),
    "completion stream of choices": lambda c: list(
        c.completions.create(
            model=MODEL, prompt=TEXT, stream=True, n=2, logprobs=1, stream_options={"include_usage": True}
        )
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_call_is_one_whole_span(wired, way):
    assert WAYS[way](wired.client)
    check_whole(wired)


async def _a_stream(client):
    return [c async for c in await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)]


async def _a_helper(client):
    async with client.chat.completions.stream(model=MODEL, messages=MESSAGES) as events:
        return [event.type async for event in events]


async def _a_late(client):
    async with client.chat.completions.with_streaming_response.create(model=MODEL, messages=MESSAGES) as answer:
        return await answer.json()


async def _a_lines(client):
    streaming = client.chat.completions.with_streaming_response
    async with streaming.create(model=MODEL, messages=MESSAGES, stream=True) as answer:
        return [line async for line in answer.iter_lines()]


async def _a_completion_stream(client):
    return [chunk async for chunk in await client.completions.create(model=MODEL, prompt=TEXT, stream=True)]


ASYNC_WAYS = {
    "completion": lambda c: c.completions.create(model=MODEL, prompt=TEXT),
    "completion stream": _a_completion_stream,
    "create": lambda c: c.chat.completions.create(model=MODEL, messages=MESSAGES),
    "raw": lambda c: c.chat.completions.with_raw_response.create(model=MODEL, messages=MESSAGES),
    "stream": _a_stream,
    "stream helper": _a_helper,
    "late json": _a_late,
    "lines of a stream": _a_lines,
    "responses": lambda c: c.responses.create(model=MODEL, input="hello there"),
}


@pytest.mark.parametrize("way", ASYNC_WAYS)
async def test_every_async_way_to_call_is_one_whole_span(wired, way):
    async with openai.AsyncOpenAI(base_url=wired.server.url, api_key="sk") as client:
        assert await ASYNC_WAYS[way](client)
    check_whole(wired)


def test_what_is_said_beside_the_bodies(wired):
    wired.client.chat.completions.create(
        model=MODEL, messages=MESSAGES, n=2, temperature=0.5, top_p=0.9, max_completion_tokens=7
    )
    span = check_whole(wired)
    usage = wired.server.requests[0].answer["usage"]
    assert {key: value for key, value in span.attributes.items() if key not in {names.REQUEST, names.RESPONSE}} == {
        names.FRAMEWORK: "openai",
        names.PROVIDER: "openai",
        names.SERVER_ADDRESS: "127.0.0.1",
        names.ENDPOINT: "/chat/completions",
        names.STREAMED: False,
        names.REQUEST_MODEL: MODEL,
        names.REQUEST_TEMPERATURE: 0.5,
        names.REQUEST_TOP_P: 0.9,
        names.REQUEST_MAX_TOKENS: 7,
        names.REQUEST_CHOICE_COUNT: 2,
        names.RESPONSE_ID: wired.server.requests[0].answer["id"],
        names.RESPONSE_MODEL: MODEL,
        names.FINISH_REASONS: ["stop", "stop"],
        names.INPUT_TOKENS: usage["prompt_tokens"],
        names.OUTPUT_TOKENS: usage["completion_tokens"],
    }
    assert (span.operation, span.name) == ("chat", MODEL)


def test_other_requests_are_not_recorded(wired):
    wired.client.models.list()
    with pytest.raises(openai.NotFoundError):
        wired.client.embeddings.create(model=MODEL, input="hello")
    assert wired.sink.spans == []


@pytest.mark.parametrize(
    ("url", "endpoint"),
    [
        ("/chat/completions", "/chat/completions"),
        ("chat/completions", "/chat/completions"),
        ("/deployments/gpt/chat/completions", "/chat/completions"),
        ("/completions", "/completions"),
        ("completions", "/completions"),
        ("/deployments/gpt/completions", "/completions"),
        ("https://host/v1/completions?api-version=1", "/completions"),
        ("/autocompletions", None),
        ("https://host/v1/chat/completions?api-version=1", "/chat/completions"),
        ("/responses", "/responses"),
        ("responses", "/responses"),
        ("/responses/resp_1/cancel", None),
        ("/chat/completions/chatcmpl-1", None),
        ("/embeddings", None),
        ("/autoresponses", None),
    ],
)
def test_only_model_calls_are_recognised(url, endpoint):
    assert endpoint_of("post", url) == endpoint
    assert endpoint_of("get", url) is None


# Streams that end early, calls that fail


def test_a_stream_counts_what_the_agent_took_of_it(wired):
    stream = wired.client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
    taken = [next(stream) for _ in range(3)]
    stream.close()
    span, _ = only(wired)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in taken)
    assert json.loads(span.attributes[names.RESPONSE])["choices"][0]["message"]["content"] == text
    assert span.attributes[names.ABANDONED] is True


def test_a_stream_left_after_its_last_word_is_whole(wired):
    for chunk in wired.client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True):
        if chunk.choices[0].finish_reason:
            break
    settle()
    del chunk
    settle()
    check_whole(wired)


def test_a_stream_that_is_never_read_is_a_span(wired):
    wired.client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
    settle()
    span, _ = only(wired)
    assert span.attributes[names.ABANDONED] is True
    assert names.RESPONSE not in span.attributes


def test_a_late_body_that_is_never_read_is_a_span(wired):
    with wired.client.chat.completions.with_streaming_response.create(model=MODEL, messages=MESSAGES):
        pass
    span, _ = only(wired)
    assert span.attributes[names.ABANDONED] is True


def test_detach_ends_the_streams_that_are_open(wired):
    undo = patch.bind(wired.recorder)
    stream = wired.client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
    first = next(stream)
    patch._end_unfinished()
    undo()
    rest = list(stream)  # the agent reads on undisturbed
    assert "".join(c.choices[0].delta.content or "" for c in [first, *rest]).startswith("writer answers")
    assert len(wired.sink.spans) == 1


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_call_that_waits_for_its_answer_at_detach_is_an_abandoned_span(stream):
    sink, arrived, go_on = ListSink(), threading.Event(), threading.Event()
    recorder = SpanRecorder(make_tracer("embedded", sink))

    def wait(body, seen):
        arrived.set()
        go_on.wait(60)
        return Reply("late")

    def work(client):
        answer = ask(None, "writer", "hi", client=client, stream=stream)
        return "".join(chunk.choices[0].delta.content or "" for chunk in answer) if stream else text_of(answer)

    with (
        ScriptedServer(wait) as server,
        ThreadPoolExecutor(1) as pool,
        openai.OpenAI(base_url=server.url, api_key="sk") as client,
    ):
        undo = patch.bind(recorder)
        asked = pool.submit(work, client)
        arrived.wait(60)
        undo()
        spans = sink.spans
        undo = patch.bind(recorder)  # to be recorded again changes nothing for this call
        go_on.set()
        assert asked.result() == "late"
        assert not unfinished
        undo()
    (span,), (request,) = spans, server.requests
    assert request.headers["traceparent"].split("-")[2] == span.span_id
    assert json.loads(span.attributes[names.REQUEST])["messages"] == request.body["messages"]
    assert (span.status, span.attributes[names.ABANDONED]) == ("ok", True)
    assert names.RESPONSE not in span.attributes
    assert len(sink.spans) == 1


async def test_an_async_stream_that_is_left_or_cancelled_is_marked(wired):
    async with openai.AsyncOpenAI(base_url=wired.server.url, api_key="sk") as client:

        async def leave():
            async for _ in await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True):
                return

        async def linger():
            async for _ in await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True):
                started.set()
                await asyncio.sleep(60)

        started = asyncio.Event()
        await leave()
        task = asyncio.create_task(linger())
        await started.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        del task
        for _ in range(20):
            gc.collect()
            await asyncio.sleep(0.01)
            if len(wired.sink.spans) == 2:
                break
    assert [span.attributes.get(names.ABANDONED) for span in wired.sink.spans] == [True, True]


async def test_a_cancelled_call_is_an_error(wired):
    async with openai.AsyncOpenAI(base_url=wired.server.url, api_key="sk") as client:
        slow = [{"role": "user", "content": "wait 0.3"}]
        task = asyncio.create_task(client.chat.completions.create(model=MODEL, messages=slow))
        while not wired.server.requests and not task.done():
            await asyncio.sleep(0.01)
            if patch._current.get() is None and task.get_stack():
                await asyncio.sleep(0.05)
                break
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    (span,) = wired.sink.spans
    assert (span.status, span.attributes[names.ERROR_TYPE]) == ("error", "CancelledError")


@pytest.mark.parametrize("elsewhere", [False, True], ids=["in its own event loop", "in another thread's"])
def test_a_client_that_is_collected_is_closed_in_its_own_event_loop_alone(wired, elsewhere):
    """Closed in another thread's, it would close connections of this one's loop, whose file numbers others may have."""

    async def used():
        await ask_async(openai.AsyncOpenAI(base_url=wired.server.url, api_key="k"), "writer", "hello")

    async def collected():
        gc.collect()
        return [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]

    async def program():
        gc.collect()
        gc.disable()
        try:
            await used()
            if elsewhere:
                return await asyncio.to_thread(asyncio.run, collected())
            return await collected()
        finally:
            gc.enable()

    assert len(asyncio.run(program())) == (0 if elsewhere else 1)


def test_errors_say_what_happened(wired):
    client = wired.client.with_options(max_retries=1)
    with pytest.raises(openai.RateLimitError):
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "fail 429 9"}])
    (span,) = wired.sink.spans
    assert span.attributes[names.ERROR_TYPE] == "RateLimitError"
    assert span.attributes["http.response.status_code"] == 429
    assert span.attributes["http.request.resend_count"] == 1
    assert "fails 2 of 9" in span.status_message
    assert json.loads(span.attributes[names.REQUEST]) == wired.server.requests[-1].body


def test_a_call_that_never_left_has_its_request(wired):
    client = openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="sk", max_retries=0)
    with pytest.raises(openai.APIConnectionError):
        client.chat.completions.create(model=MODEL, messages=MESSAGES)
    (span,) = wired.sink.spans
    assert json.loads(span.attributes[names.REQUEST]) == {"model": MODEL, "messages": MESSAGES}
    assert span.status == "error"


def test_a_timeout_is_an_error(wired):
    with pytest.raises(openai.APITimeoutError):
        wired.client.with_options(max_retries=0, timeout=0.05).chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "wait 0.3"}]
        )
    (span,) = wired.sink.spans
    assert span.attributes[names.ERROR_TYPE] == "APITimeoutError"


def test_an_answer_that_the_client_refuses_is_kept(wired):
    with pytest.raises(ValidationError):
        wired.client.chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=Answer)
    span, request = only(wired)
    assert (span.status, span.attributes[names.ERROR_TYPE]) == ("error", "ValidationError")
    assert json.loads(span.attributes[names.RESPONSE]) == request.answer


def test_a_compressed_stream_is_kept_in_clear(wired):
    events = 'data: {"id": "c1", "choices": [{"index": 0, "delta": {"content": "hi"}, "finish_reason": "stop"}]}\n\n'

    def answer(request):
        body = gzip.compress(f"{events}data: [DONE]\n\n".encode())
        headers = {"content-encoding": "gzip", "content-type": "text/event-stream"}
        return http.Response(200, headers=headers, stream=Parts(body))

    class Parts(http.SyncByteStream):
        def __init__(self, body):
            self.body = body

        def __iter__(self):
            yield self.body[:10]
            yield self.body[10:]

    transport = http.Client(transport=http.MockTransport(answer))
    client = openai.OpenAI(base_url="http://model/v1", api_key="sk", http_client=transport)
    chunks = list(client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True))
    assert chunks[0].choices[0].delta.content == "hi"
    (span,) = wired.sink.spans
    assert json.loads(span.attributes[names.RESPONSE])["choices"][0]["message"]["content"] == "hi"


STREAMED = ["stream", "stream of choices", "stream of tool calls", "completion stream", "responses stream"]


@pytest.mark.parametrize("way", STREAMED)
def test_a_stream_that_a_hook_of_the_users_reads_is_put_together(wired, way):
    hooks = {"response": [lambda response: response.read()]}
    with openai.OpenAI(
        base_url=wired.server.url, api_key="sk", http_client=openai.DefaultHttpxClient(event_hooks=hooks)
    ) as client:
        assert WAYS[way](client)
    span = check_whole(wired)
    assert {names.FINISH_REASONS, names.RESPONSE_MODEL} <= span.attributes.keys()
    if "usage" in wired.server.requests[0].answer:
        assert names.OUTPUT_TOKENS in span.attributes


# What the agent sees


class WaitingSink(ListSink):
    def put(self, span, attempt):
        self.taken.append((span, attempt))


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_waits_for_delivery_holds_nothing_of_the_clients(wired, stream):
    responses, sink = [], WaitingSink()
    undo = patch.bind(SpanRecorder(make_tracer("embedded", sink)))
    hooks = {"response": [lambda response: responses.append(weakref.ref(response))]}
    with openai.OpenAI(
        base_url=wired.server.url, api_key="sk", http_client=openai.DefaultHttpxClient(event_hooks=hooks)
    ) as client:
        answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=stream)
        answer = list(answer) if stream else answer
    undo()
    settle()
    assert [response() for response in responses] == [None]
    (span,) = sink.spans
    assert json.loads(span.record().attributes[names.RESPONSE]) == wired.server.requests[0].answer


def test_the_callers_objects_are_left_as_they_are(wired):
    messages, headers = copy.deepcopy(MESSAGES), {"x-mine": "1"}
    wired.client.chat.completions.create(model=MODEL, messages=messages, extra_headers=headers)
    messages[0]["content"] = "changed later"
    assert headers == {"x-mine": "1"}
    span, request = only(wired)
    assert request.headers["x-mine"] == "1"
    assert "changed later" not in span.attributes[names.REQUEST]


def test_the_users_own_traceparent_is_kept(wired):
    theirs = f"00-{'1' * 32}-{'2' * 16}-01"
    wired.client.chat.completions.create(model=MODEL, messages=MESSAGES, extra_headers={"Traceparent": theirs})
    assert wired.server.requests[0].headers["traceparent"] == theirs
    assert len(wired.sink.spans) == 1


def test_the_users_own_traces_keep_their_shape(tmp_path):
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    theirs = provider.get_tracer("theirs")
    with lightning_openai.attach(store=str(tmp_path / "traces.db")) as attached:
        with theirs.start_as_current_span("outer"), agent("writer"), theirs.start_as_current_span("inner"):
            pass
        attached.flush(60)
    inner, outer = exporter.get_finished_spans()
    assert inner.parent.span_id == outer.context.span_id
    assert len(open_spans(tmp_path)) == 1
    assert open_spans(tmp_path)[0].parent_id is None


def open_spans(folder):
    store = open_store(str(folder / "traces.db"))
    try:
        return store.spans()
    finally:
        store.close()


def test_a_recorder_that_fails_harms_nothing(wired, caplog):
    class Broken:
        def start(self, span, context):
            raise RuntimeError("no ids today")

    wired.recorder.tracer = Broken()
    assert text_of(wired.client.chat.completions.create(model=MODEL, messages=MESSAGES)).startswith("writer answers")
    assert "no ids today" in caplog.text
    assert "lightning_openai" in caplog.text


# Patching


def test_two_plugins_share_one_patch_and_the_last_undo_restores(wired):
    patched = SyncAPIClient.request
    undo = patch.bind(wired.recorder)
    assert SyncAPIClient.request is patched
    wired.client.chat.completions.create(model=MODEL, messages=MESSAGES)
    assert len(wired.sink.spans) == 1
    undo()
    undo()  # the second time it changes nothing
    assert SyncAPIClient.request is patched


def test_a_patch_that_somebody_put_over_ours_stays():
    sink = ListSink()
    recorder = SpanRecorder(make_tracer("embedded", sink))
    original = SyncAPIClient.request
    undo = patch.bind(recorder)
    ours = SyncAPIClient.request
    calls = []

    def theirs(self, *args, **kwargs):
        calls.append(args)
        return ours(self, *args, **kwargs)

    try:
        SyncAPIClient.request = theirs
        undo()
        assert SyncAPIClient.request is theirs
        undo = patch.bind(recorder)  # now we are above theirs, and below it
        with ScriptedServer() as server, openai.OpenAI(base_url=server.url, api_key="sk") as client:
            client.chat.completions.create(model=MODEL, messages=MESSAGES)
        assert len(calls) == len(sink.spans) == 1
        assert json.loads(sink.spans[0].attributes[names.RESPONSE]) == server.requests[0].answer
        undo()
        assert SyncAPIClient.request is theirs
    finally:
        SyncAPIClient.request = original


# Rerouting


@pytest.fixture
def policy():
    with ScriptedServer() as server:
        yield server


def attempt_at(policy, *agents):
    return use_attempt(Attempt("r", "a", endpoint=policy.base, key="attempt-key", agents=agents))


def test_nothing_of_the_users_goes_to_the_policy(wired, policy, monkeypatch):
    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", "x-env: secret")
    monkeypatch.setenv("OPENAI_ADMIN_KEY", "sk-admin-secret")
    own = http.Client(
        auth=("user", "secret"), headers={"x-http": "secret"}, cookies={"c": "secret"}, params={"p": "secret"}
    )
    client = openai.OpenAI(
        base_url=f"{wired.server.url}",
        api_key="sk-secret",
        organization="org-secret",
        project="proj-secret",
        default_headers={"x-default": "secret", "api-key": "secret"},
        default_query={"q": "secret"},
        http_client=own,
    )
    with attempt_at(policy, "writer"), agent("writer"):
        client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            extra_headers={"x-call": "secret", "cookie": "secret", "idempotency-key": "mine"},
            extra_query={"call": "secret"},
            extra_body={"model": "theirs", "top_k": 3},
        )
    (request,) = policy.requests
    assert not wired.server.requests
    assert request.path == "/v1/chat/completions"
    assert request.body == {"model": "policy", "messages": MESSAGES, "top_k": 3}
    assert "secret" not in json.dumps(request.headers)
    assert request.headers["authorization"] == "Bearer attempt-key"
    assert request.headers["idempotency-key"] == "mine"
    (span,) = wired.sink.spans
    assert json.loads(span.attributes[names.REQUEST]) == request.body
    assert request.headers["traceparent"].split("-")[2] == span.span_id
    assert span.attributes[names.REROUTED] is True
    assert span.attributes[names.REQUEST_MODEL] == span.name == "policy"


def test_azure_calls_are_rerouted_without_asking_azure_for_a_token(wired, policy):
    def token():
        raise AssertionError("a rerouted call needs no token")

    client = openai.AzureOpenAI(
        azure_endpoint=wired.server.base, api_version="2025-01-01", azure_ad_token_provider=token, max_retries=0
    )
    with attempt_at(policy, "writer"), agent("writer"):
        client.chat.completions.create(model="deployed", messages=MESSAGES)
        list(client.chat.completions.create(model="deployed", messages=MESSAGES, stream=True))
    assert [request.path for request in policy.requests] == ["/v1/chat/completions"] * 2
    assert {span.attributes[names.PROVIDER] for span in wired.sink.spans} == {"azure.ai.openai"}


def test_azure_calls_that_stay_are_recorded(wired):
    client = openai.AzureOpenAI(azure_endpoint=wired.server.base, api_version="2025-01-01", api_key="azure-key")
    client.chat.completions.create(model="deployed", messages=MESSAGES)
    check_whole(wired)
    assert "/deployments/deployed/chat/completions" in wired.server.requests[0].path


def test_a_request_for_a_token_does_not_name_the_call(wired):
    asked = []

    def token():
        answers = http.MockTransport(lambda request: asked.append(request) or http.Response(204))
        with http.Client(transport=answers) as own:
            own.get("http://login.invalid/token")
        return "token"

    client = openai.AzureOpenAI(
        azure_endpoint=wired.server.base, api_version="2025-01-01", azure_ad_token_provider=token, max_retries=0
    )
    client.chat.completions.create(model="deployed", messages=MESSAGES)
    check_whole(wired)
    assert "traceparent" in wired.server.requests[0].headers
    assert not [request for request in asked if "traceparent" in request.headers]
    assert asked


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_call_is_rerouted(wired, policy, way):
    with attempt_at(policy, "writer"), agent("writer"):
        assert WAYS[way](wired.client)
    assert not wired.server.requests
    (request,), (span,) = policy.requests, wired.sink.spans
    assert json.loads(span.attributes[names.REQUEST]) == request.body
    assert json.loads(span.attributes[names.RESPONSE]) == request.answer


def test_limits_of_the_users_client_hold_for_rerouted_calls(wired, policy):
    client = openai.OpenAI(base_url=wired.server.url, api_key="sk", max_retries=0, timeout=0.05)
    with attempt_at(policy, "writer"), agent("writer"):
        with pytest.raises(openai.RateLimitError):
            client.with_options(timeout=60).chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "fail 429 9"}]
            )
        with pytest.raises(openai.APITimeoutError):
            client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "wait 0.3"}])
        patient = client.with_options(max_retries=2, timeout=60)
        patient.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "fail 503 1"}])
    assert len(policy.requests) in {3, 4}  # the one that timed out may not have been counted yet


def test_rerouting_works_in_one_event_loop_after_the_other(wired, policy):
    async def work():
        async with openai.AsyncOpenAI(base_url=wired.server.url, api_key="sk") as client:
            calls = [client.chat.completions.create(model=MODEL, messages=MESSAGES) for _ in range(3)]
            return await asyncio.gather(*calls)

    with attempt_at(policy, "writer"), agent("writer"):
        for _ in range(3):
            asyncio.run(work())
    assert len(policy.requests) == 9
    assert len(reroute._by_loop) == 1  # those of loops that are over were let go


def test_the_agents_name_is_sent_in_ascii(wired, policy):
    with attempt_at(policy, "*"), agent("rédacteur/1 ✓"):
        wired.client.chat.completions.create(model=MODEL, messages=MESSAGES)
    assert unquote(policy.requests[0].headers["x-lightning-agent"]) == "rédacteur//1 ✓"  # a part of a path


def test_outside_of_attempts_span_and_agent_are_named_to_the_server_of_the_spans_and_to_nobody_else():
    def sent(store, url, headers=()):
        span = SimpleNamespace(path="billing/writer", traceparent="00-1-2-01", attempt=None)
        return reroute.server_headers(store, url, span, dict(headers))

    named = {"x-lightning-agent": "billing/writer", "x-lightning-traceparent": "00-1-2-01"}
    assert sent("http://server:8000", "http://server:8000/v1/chat/completions") == named
    assert sent("http://server:8000/", "http://server:8000/v1/chat/completions") == named
    assert sent("http://server:8000", "http://server:80001/v1/chat/completions") == {}
    assert sent("http://server:8000", "https://api.openai.com/v1/chat/completions") == {}
    assert sent("lightning.db", "lightning.db/v1") == sent(None, "http://server:8000/v1") == {}
    own = {"x-lightning-agent": "own"}
    assert sent("http://server:8000", "http://server:8000/v1", own) == {"x-lightning-traceparent": "00-1-2-01"}


def test_a_call_without_a_known_agent_is_never_rerouted(wired, policy):
    with attempt_at(policy, "*"):
        wired.client.chat.completions.create(model=MODEL, messages=MESSAGES)
    assert len(wired.server.requests) == 1
    assert not policy.requests


def test_attach_can_limit_which_agents_are_rerouted(policy, tmp_path, monkeypatch):
    monkeypatch.setenv("LIGHTNING_SPOOL", str(tmp_path / "spool"))
    with ScriptedServer() as origin:
        client = openai.OpenAI(base_url=origin.url, api_key="sk")
        with lightning_openai.attach(agents=["writer"], store=str(tmp_path / "traces.db")), attempt_at(policy, "*"):
            for name in ("writer", "rewriter"):
                with agent(name):
                    client.chat.completions.create(model=MODEL, messages=MESSAGES)
        assert (len(policy.requests), len(origin.requests)) == (1, 1)


# Clients with a `request` of their own


class Counting(openai.OpenAI):
    count = 0

    def request(self, *args, **options):
        self.count += 1
        return super().request(*args, **options)


class AsyncCounting(openai.AsyncOpenAI):
    count = 0

    async def request(self, *args, **options):
        self.count += 1
        return await super().request(*args, **options)


def check_one_chat(wired, server):
    (span,), (request,) = wired.sink.spans, server.requests
    assert request.headers["traceparent"].split("-")[2] == span.span_id
    assert json.loads(span.attributes[names.REQUEST]) == request.body
    assert json.loads(span.attributes[names.RESPONSE]) == request.answer
    assert span.status == "ok"
    assert not unfinished
    return span, request


REROUTED = pytest.mark.parametrize("rerouted", [False, True], ids=["recorded", "rerouted"])


def around(wired, policy, *, rerouted):
    """Return an attempt that reroutes or does not, and the server that its calls go to."""
    return attempt_at(policy, *["writer"] * rerouted), policy if rerouted else wired.server


@REROUTED
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_clients_own_request_is_run_wherever_its_call_goes(wired, policy, rerouted, stream):
    attempt, server = around(wired, policy, rerouted=rerouted)
    client = Counting(base_url=wired.server.url, api_key="sk")
    with attempt, agent("writer"):
        answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=stream)
    assert list(answer) if stream else text_of(answer)
    assert client.count == 1
    span, request = check_one_chat(wired, server)
    assert span.attributes.get(names.REROUTED, False) is rerouted
    assert request.body["model"] == ("policy" if rerouted else MODEL)
    assert len(wired.server.requests) + len(policy.requests) == 1


@REROUTED
async def test_an_async_clients_own_request_is_run_wherever_its_call_goes(wired, policy, rerouted):
    attempt, server = around(wired, policy, rerouted=rerouted)
    async with AsyncCounting(base_url=wired.server.url, api_key="sk") as client:
        with attempt, agent("writer"):
            assert text_of(await client.chat.completions.create(model=MODEL, messages=MESSAGES))
        assert client.count == 1
    span, _ = check_one_chat(wired, server)
    assert span.attributes.get(names.REROUTED, False) is rerouted
    assert len(wired.server.requests) + len(policy.requests) == 1


@REROUTED
def test_what_a_clients_own_request_changes_in_a_copy_is_sent(wired, policy, rerouted):
    class Cooler(openai.OpenAI):
        def request(self, cast_to, options, **more):
            copied = copy.copy(options)
            copied.json_data = {**options.json_data, "temperature": 0.25}
            return super().request(cast_to, copied, **more)

    attempt, server = around(wired, policy, rerouted=rerouted)
    with attempt, agent("writer"):
        Cooler(base_url=wired.server.url, api_key="sk").chat.completions.create(
            model=MODEL, messages=MESSAGES, temperature=1.0
        )
    _, request = check_one_chat(wired, server)
    assert request.body["temperature"] == 0.25


@REROUTED
@pytest.mark.parametrize("by", ["itself", "another"])
def test_a_call_inside_a_clients_own_request_is_a_span_of_its_own(wired, policy, rerouted, by):
    class Asking(openai.OpenAI):
        asked = False

        def request(self, cast_to, options, **more):
            if not self.asked:
                self.asked = True
                ask(None, "writer", "first", client=self if by == "itself" else wired.client)
            return super().request(cast_to, options, **more)

    attempt, server = around(wired, policy, rerouted=rerouted)
    with attempt, agent("writer"):
        ask(None, "writer", "second", client=Asking(base_url=wired.server.url, api_key="sk"))
    spans = {span.span_id: span for span in wired.sink.spans if span.operation == names.CHAT}
    assert [request.body["messages"][1]["content"] for request in server.requests] == ["first", "second"]
    assert len(spans) == 2
    for request in server.requests:
        span = spans[request.headers["traceparent"].split("-")[2]]
        assert json.loads(span.attributes[names.REQUEST]) == request.body
        assert json.loads(span.attributes[names.RESPONSE]) == request.answer
    assert not unfinished


# Forked children


FORKING = """
import gc, multiprocessing, os, sys
import openai, lightning_openai
from lightning_openai import agent, patch, reroute
from lightning_spans import Attempt, open_store, use_attempt

url, base = sys.argv[1:]
attachment = lightning_openai.attach(store="own.db")
client = openai.OpenAI(base_url=url, api_key="sk")

def ask(**options):
    messages = [{{"role": "system", "content": "You are writer."}}, {{"role": "user", "content": "say a b c d e"}}]
    return client.chat.completions.create(model="m", messages=messages, **options)

{program}
"""
OWN_CONNECTIONS = """
def rerouted():
    attempt = Attempt("r", "a", endpoint=base, key="k", agents=("writer",))
    with use_attempt(attempt), agent("writer"):
        ask()

def work():
    assert not reroute._sync
    rerouted()
    assert reroute._sync.keys() == parents.keys()
    assert all(reroute._sync[key] is not parents[key] for key in parents)
    attachment.detach()

rerouted()
parents = dict(reroute._sync)
reroute._lock.acquire()
patch._lock.acquire()
child = multiprocessing.get_context("fork").Process(target=work, daemon=True)
child.start()
child.join(60)
reroute._lock.release()
patch._lock.release()
if child.is_alive():
    child.kill()
    sys.exit("the child hangs")
assert child.exitcode == 0, child.exitcode
"""
OPEN_STREAM = """
stream = ask(stream=True)
taken = [next(stream) for _ in range(2)]
child = os.fork()
if child == 0:
    {end}
assert os.waitpid(child, 0)[1] == 0
taken += stream
assert "".join(chunk.choices[0].delta.content or "" for chunk in taken) == "a b c d e"
attachment.detach()
store = open_store("own.db")
(span,) = store.spans()
assert "lightning.abandoned" not in span.attributes, span
assert "a b c d e" in span.attributes["lightning.response"], span
"""


def run_forking(program, tmp_path, policy):
    environ = {**os.environ, "LIGHTNING_SPOOL": str(tmp_path / "spool")}
    command = [sys.executable, "-c", FORKING.format(program=program), policy.url, policy.base]
    ran = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=240, check=False)
    assert ran.returncode == 0, ran.stderr


FORKS = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


@FORKS
def test_a_forked_child_has_connections_and_locks_of_its_own(tmp_path, policy):
    run_forking(OWN_CONNECTIONS, tmp_path, policy)
    assert len(policy.requests) == 2


@FORKS
@pytest.mark.parametrize("end", ["sys.exit()", "del stream; gc.collect(); patch.abandoned.wait(60); sys.exit()"])
def test_a_child_that_ends_does_not_end_its_parents_stream(tmp_path, policy, end):
    run_forking(OPEN_STREAM.format(end=end), tmp_path, policy)


# Streams put together


PIECES = st.lists(st.text(alphabet='ab \n"{}é✓', min_size=1, max_size=8).filter(str.strip), min_size=1, max_size=6)


@given(texts=PIECES, n=st.integers(1, 3), usage=st.booleans(), logprobs=st.booleans())
def test_a_stream_put_together_is_what_would_have_been_sent_without_it(texts, n, usage, logprobs):
    body = {"model": MODEL, "messages": [], "n": n, "stream": True, "logprobs": logprobs}
    body["stream_options"] = {"include_usage": usage}
    calls = [ScriptedToolCall("f", json.dumps({"x": text})) for text in texts]
    for reply in (Reply(" ".join(texts)), Reply(tool_calls=calls)):
        whole = answer("/chat/completions", body, reply, 0)
        events = list(pieces("/chat/completions", body, whole))
        assert put_together("/chat/completions", events) == whole
        assert is_whole("/chat/completions", whole)


@given(texts=PIECES, n=st.integers(1, 3), usage=st.booleans(), top=st.sampled_from([None, 0, 1]))
def test_a_completions_stream_put_together_is_what_would_have_been_sent_without_it(texts, n, usage, top):
    body = {"model": MODEL, "prompt": "so", "n": n, "stream": True, "logprobs": top}
    body["stream_options"] = {"include_usage": usage}
    whole = answer("/completions", body, Reply(" ".join(texts)), 0)
    events = list(pieces("/completions", body, whole))
    assert put_together("/completions", events) == whole
    assert is_whole("/completions", whole)
    only_token = len(whole["choices"][0]["token_ids"]) == 1
    assert is_whole("/completions", put_together("/completions", events[:1])) is only_token


@given(texts=PIECES, cut=st.integers(0, 400))
def test_a_stream_cut_anywhere_gives_what_had_come(texts, cut):
    for endpoint in ("/chat/completions", "/responses"):
        body = {"model": MODEL, "messages": [], "input": "", "stream": True}
        whole = answer(endpoint, body, Reply(" ".join(texts)), 0)
        sent = "".join(f"event: x\ndata: {json.dumps(event)}\n\n" for event in pieces(endpoint, body, whole))
        events, done, _ = read_events(sent[: len(sent) * cut // 400])
        assert not done
        response = put_together(endpoint, events)
        if cut == 400:
            assert response == whole
        elif events and endpoint == "/chat/completions":
            content = response["choices"][0]["message"]["content"] or ""
            assert whole["choices"][0]["message"]["content"].startswith(content)


_ADDED = st.text(alphabet='ab \n"\\\\{},:[]é✓\U0001f600', max_size=4)
_PARTS = st.one_of(
    _ADDED.map(lambda text: {"index": 0, "delta": {"content": text}, "finish_reason": None}),
    _ADDED.map(lambda text: {"delta": {"content": text}, "index": 0}),
    _ADDED.map(lambda text: {"index": len(text) % 2, "delta": {"content": text}, "token_ids": [5]}),
    _ADDED.map(lambda text: {"index": 0, "delta": {"content": text}, "text": "x"}),
    _ADDED.map(lambda text: {"index": 0, "delta": {"content": text}, "logprobs": {"content": [{"token": text}]}}),
    _ADDED.map(lambda text: {"index": 0, "delta": {"role": "assistant", "content": text}}),
    _ADDED.map(lambda text: {"index": 0, "delta": {"content": text, "reasoning": "so"}}),
    _ADDED.map(lambda text: {"index": 0, "delta": {}, "finish_reason": "stop", "stop_reason": text}),
)
_EVENTS = st.one_of(
    st.builds(lambda part: {"id": "a", "choices": [part]}, _PARTS),
    st.builds(lambda part, text: {"content": text, "choices": [part]}, _PARTS, _ADDED),
    st.builds(lambda part, other: {"id": "a", "choices": [part, other], "usage": None}, _PARTS, _PARTS),
    st.builds(lambda part: {"id": "a", "choices": [part], "usage": {"completion_tokens": 1}}, _PARTS),
)


def _adds(text, **more):
    return {"id": "a", "choices": [{"index": 0, "delta": {"content": text, **more}}]}


@given(
    events=st.lists(st.tuples(_EVENTS, st.integers(1, 3)), max_size=6),
    separators=st.sampled_from([(",", ":"), (", ", ": ")]),
    plain=st.booleans(),
    taken=st.none() | st.integers(0, 12),
)
@example(events=[(_adds('x"'), 1), (_adds('"'), 1), (_adds('y"'), 1)], separators=(",", ":"), plain=True, taken=None)
@example(events=[(_adds("x", reasoning="so"), 3)], separators=(",", ":"), plain=True, taken=None)
def test_events_read_as_one_come_to_the_same(events, separators, plain, taken):
    given = [event for event, times in events for _ in range(times)]
    sent = [json.dumps(event, separators=separators, ensure_ascii=plain) for event in given]
    stream = "".join(f"data: {text}\n\n" for text in [*sent, "[DONE]"])
    found, done, more = read_events(stream, taken)
    assert (done, more) == (True, taken is not None and taken < len(given))
    assert put_together("/chat/completions", found) == put_together("/chat/completions", given[:taken])


def test_events_that_add_text_alone_are_read_as_one():
    part = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
    texts = ['"', "a", "\n", "b", '"', "é", "c"]  # a text with a quotation mark is read by itself
    parts = [part, *({"index": 0, "delta": {"content": text}, "finish_reason": None} for text in texts)]
    stream = "".join(f"data: {json.dumps({'id': 'a', 'choices': [part]})}\n\n" for part in parts)
    found = read_events(f"{stream}data: [DONE]\n\n").found
    assert [event["choices"][0]["delta"]["content"] for event in found] == ["", '"', "a\nb", '"', "éc"]


def test_tokens_of_a_completion_are_kept_apart_even_where_one_is_named_as_a_key():
    flat = {"tokens": ["index"], "token_logprobs": [0.0], "top_logprobs": [{"index": 0.0}], "text_offset": [0]}
    chunks = [{"id": "a", "choices": [{"index": 0, "text": "index", "logprobs": flat}]}] * 2
    (choice,) = put_together("/completions", chunks)["choices"]
    assert choice["text"] == "indexindex"
    assert choice["logprobs"]["top_logprobs"] == [{"index": 0.0}] * 2


def test_odd_streams_are_put_together():
    told = 'data: {"id": "a"}\n\nevent: more\ndata: {"id": "b"}\n\ndata: {"id":\ndata: "c"}\n\ndata: [DONE]\n\n'
    assert read_events(told) == ([{"id": "a"}, {"id": "b"}, {"id": "c"}], True, False)
    assert read_events(told, 2) == ([{"id": "a"}, {"id": "b"}], True, True)
    assert read_events(told, 3) == read_events(told, 4) == read_events(told)
    assert read_events('data: {"id": "a"}\n\ndata: [DONE]\n\ndata: {"id": "b"}\n\ndata: [DONE]\n\n') == (
        [{"id": "a"}],
        True,
        False,
    )
    assert read_events("data: 1\n\ndata: [DONE]\n\n") == ([], True, False)
    events, done, _ = read_events(': ping\r\n\r\ndata: {"id": "a",\r\ndata: "choices": []}\r\n\r\ndata: [DONE]\r\n\r\n')
    assert (events, done) == ([{"id": "a", "choices": []}], True)
    chunks = [
        {"id": "a", "choices": [{"index": 1, "delta": {"role": "assistant", "reasoning_content": "so "}}]},
        {"id": "a", "choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": None, "token_ids": [1]}]},
        {"id": "a", "prompt_token_ids": [7, 8], "choices": [{"index": 1, "delta": {"reasoning_content": "it is"}}]},
        {"id": "a", "prompt_token_ids": [7, 8], "choices": [{"index": 0, "delta": {}, "token_ids": [2, 3]}]},
        {"id": "a", "choices": [{"index": 0, "delta": {"content": None}, "finish_reason": "stop", "stop_reason": 5}]},
    ]
    assert put_together("/chat/completions", chunks) == {
        "id": "a",
        "prompt_token_ids": [7, 8],
        "choices": [
            {
                "index": 0,
                "message": {"content": "x"},
                "finish_reason": "stop",
                "token_ids": [1, 2, 3],
                "stop_reason": 5,
            },
            {"index": 1, "message": {"role": "assistant", "reasoning_content": "so it is", "content": None}},
        ],
    }


@pytest.mark.parametrize(
    ("response", "reasons"),
    [
        ({"status": "completed", "output": [{"type": "message"}]}, ["stop"]),
        ({"status": "completed", "output": [{"type": "function_call"}]}, ["tool_calls"]),
        ({"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}, ["length"]),
        ({"status": "incomplete", "incomplete_details": {"reason": "content_filter"}}, ["content_filter"]),
        ({"status": "failed"}, None),
    ],
)
def test_responses_end_for_reasons_in_the_words_of_completions(response, reasons):
    assert response_attributes("/responses", response).get(names.FINISH_REASONS) == reasons
