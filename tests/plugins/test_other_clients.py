"""Models that are reached with a client of another library: the call's span, named where the gateway is asked."""

from __future__ import annotations

import asyncio
import importlib

import pytest

pytest.importorskip("openai")

from lightning_conformance.plugins.server import ScriptedServer
from lightning_conformance.plugins.suite import MODEL
from lightning_openai import patch
from lightning_openai.other_clients import NOT_ASKED, OtherCall
from lightning_spans import Attempt, agent, use_attempt
from lightning_spans.record.recorder import SpanRecorder
from lightning_spans.record.tracing.tracers import make_tracer
from lightning_spans.schema import spans as names
from support.fake_sink import ListSink

REQUEST = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture
def sink():
    return ListSink()


@pytest.fixture
def recorder(sink):
    recorder = SpanRecorder(make_tracer("embedded", sink))
    undo = patch.bind(recorder)
    yield recorder
    undo()


def call(recorder):
    return OtherCall(recorder, "lightning_x", "x", lambda: REQUEST)


def chats(sink):
    return [span for span in sink.spans if span.operation == names.CHAT]


async def post(library, url):
    async with importlib.import_module(library).AsyncClient() as client:
        return (await client.post(f"{url}/chat/completions", json=REQUEST)).json()


def post_at_once(library, url):
    with importlib.import_module(library).Client() as client:
        return client.post(f"{url}/chat/completions", json=REQUEST).json()


@pytest.mark.parametrize("library", ["httpx", "httpx2"])
@pytest.mark.parametrize("at_once", [True, False])
def test_a_request_to_the_gateway_names_its_span_and_agent_and_one_to_elsewhere_does_not(
    library, at_once, recorder, sink
):
    pytest.importorskip(library)

    async def ask(url):
        return post_at_once(library, url) if at_once else await post(library, url)

    async def work(policy, other):
        answer = await call(recorder).asked(ask(policy.url), lambda body: body)
        await call(recorder).asked(ask(other.url), lambda body: body)
        return answer

    with ScriptedServer() as policy, ScriptedServer() as other:
        attempt = Attempt("r", "a", endpoint=policy.base, key="k")
        with use_attempt(attempt), agent("writer"):
            answer = asyncio.run(work(policy, other))
    (named,) = policy.requests
    (elsewhere,) = other.requests
    assert not {"traceparent", "x-lightning-traceparent", "x-lightning-agent"} & {*elsewhere.headers}
    first, second = chats(sink)
    span = f"00-{first.trace_id}-{first.span_id}-01"
    assert named.headers["traceparent"] == named.headers["x-lightning-traceparent"] == span
    assert [first.attributes[names.RESPONSE_ID], second.attributes[names.RESPONSE_ID]] == [
        answer["id"], elsewhere.answer["id"],
    ]  # fmt: skip
    assert first.status == second.status == "ok"


def test_a_call_that_failed_or_was_answered_by_a_cache_is_told_from_one_that_was_answered(recorder, sink):
    async def fail():
        raise ValueError("no such luck")

    async def work():
        with pytest.raises(ValueError, match="no such luck"):
            await call(recorder).asked(fail(), lambda _: None)
        assert await call(recorder).asked(asyncio.sleep(0, "kept"), lambda _: NOT_ASKED) == "kept"

    asyncio.run(work())
    (span,) = chats(sink)
    assert (span.status, span.status_message) == ("error", "no such luck")


def test_a_stream_that_is_left_is_a_call_without_an_answer(recorder, sink):
    async def pieces():
        yield "a"
        yield "b"

    async def work():
        steps = call(recorder).steps(pieces(), lambda _: None)
        assert await anext(steps) == "a"
        await steps.aclose()

    asyncio.run(work())
    (span,) = chats(sink)
    assert names.RESPONSE not in span.attributes


def test_what_can_not_be_said_of_a_call_harms_nothing(recorder, sink, caplog):
    def broken(*_):
        raise RuntimeError("something of ours that fails")

    asked = OtherCall(recorder, "lightning_x", "x", broken)
    assert asyncio.run(asked.asked(asyncio.sleep(0, "answer"), broken)) == "answer"
    assert caplog.text.count("the agent continues") == 2
