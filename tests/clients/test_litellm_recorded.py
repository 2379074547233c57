"""LiteLLM's own HTTP providers in plain code: each call one span, named, rerouted and joined as the openai client's."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import types

import pytest

pytest.importorskip("openai")
pytest.importorskip("lightning_openai")
pytest.importorskip("litellm")
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "true"  # else it fetches prices when it is imported

import litellm

from lightning_conformance.plugins.server import ScriptedServer
from lightning_openai import patch
from lightning_spans import Attempt, agent, use_attempt
from lightning_spans.hooks import installed
from lightning_spans.record.recorder import SpanRecorder
from lightning_spans.record.tracing.tracers import make_tracer
from lightning_spans.schema import spans as names
from support.gateway.litellm import (
    USER,
    WAYS,
    chats,
    complete,
    options,
)


@pytest.fixture
def model():
    with ScriptedServer() as server:
        yield server


@pytest.mark.parametrize("provider", ["hosted_vllm", "openrouter", "deepseek", "openai"])
@pytest.mark.parametrize("ask", WAYS)
def test_every_call_is_one_span_with_its_agent_and_what_was_said(ask, provider, recorder, model, sink):
    with agent("writer"):
        text = ask(**options(model, provider))
    (request,) = model.requests
    (span,) = chats(sink)
    assert (span.agent, span.status) == ("writer", "ok")
    asked, answer = (json.loads(span.attributes[name]) for name in (names.REQUEST, names.RESPONSE))
    assert "hello" in json.dumps(asked)
    assert text in json.dumps(answer)
    assert "secret" not in json.dumps(asked)
    if not ask.__name__.startswith("responses"):  # LiteLLM makes up ids of its own for those
        assert span.attributes[names.RESPONSE_ID] == request.answer["id"]


@pytest.mark.parametrize("provider", ["hosted_vllm", "anthropic"])
@pytest.mark.parametrize("ask", WAYS)
def test_an_agent_in_training_is_answered_by_the_policy(ask, provider, recorder, model, sink):
    with ScriptedServer() as policy:
        attempt = Attempt("r", "a", endpoint=policy.base, key="k", agents=("writer",))
        given = {**options(model, provider), "extra_headers": {"x-mine": "secret"}}
        with use_attempt(attempt), agent("writer"):
            text = ask(**given)
        (request,) = policy.requests
        asked, headers = request.body, request.headers
    assert model.requests == []
    (span,) = chats(sink)
    assert text
    assert asked["model"] == "policy"
    assert headers["traceparent"] == f"00-{span.trace_id}-{span.span_id}-01"
    assert headers["x-lightning-agent"] == "writer"
    assert headers["authorization"] == "Bearer k"
    assert "secret" not in json.dumps(headers)
    assert span.attributes[names.REROUTED] is True
    assert span.attributes[names.REQUEST_MODEL] == "policy"


def test_other_agents_stay_where_they_were(recorder, model, sink):
    with ScriptedServer() as policy:
        attempt = Attempt("r", "a", endpoint=policy.base, key="k", agents=("writer",))
        with use_attempt(attempt), agent("reader"):
            complete(**options(model))
        complete(**options(model))
        assert policy.requests == []
    assert [span.agent for span in chats(sink)] == ["reader", None]


def test_a_call_that_fails_is_an_error_and_raises_what_litellm_raises(recorder, sink):
    with ScriptedServer() as gone:
        given = options(gone)
    with pytest.raises(litellm.exceptions.InternalServerError):
        complete(**given)
    (span,) = chats(sink)
    assert span.status == "error"
    assert span.attributes[names.ERROR_TYPE] == "InternalServerError"


def test_a_stream_that_is_left_or_never_read_on_ends_with_what_was_read(recorder, model, sink):
    async def leave():
        items = await litellm.acompletion(messages=USER, stream=True, **options(model))
        await anext(items)
        await items.aclose()

    asyncio.run(leave())
    items = litellm.completion(messages=USER, stream=True, **options(model))
    assert isinstance(items, litellm.CustomStreamWrapper)
    next(items)
    assert len(chats(sink)) == 1
    items._lightning.left()  # as when it is collected, which LiteLLM's logging puts off
    assert patch.abandoned.wait(60)
    assert [span.attributes[names.ABANDONED] for span in chats(sink)] == [True, True]


def test_a_cached_answer_is_no_call(recorder, model, sink, monkeypatch):
    monkeypatch.setitem(sys.modules, "soundfile", types.ModuleType("soundfile"))  # its cache imports all of its proxy
    monkeypatch.setattr(litellm, "cache", litellm.Cache())
    assert complete(caching=True, **options(model)) == complete(caching=True, **options(model))
    assert len(chats(sink)) == len(model.requests) == 1


def test_after_detaching_litellm_is_as_it_was(model, sink):
    from lightning_openai.litellm.calls import _cell

    function = sys.modules["litellm.main"].completion
    before = _cell(function).cell_contents
    undo = patch.bind(SpanRecorder(make_tracer("embedded", sink)))
    assert _cell(function).cell_contents is not before
    undo()
    assert _cell(function).cell_contents is before
    complete(**options(model))
    assert sink.spans == []


@pytest.mark.skipif("openai" not in installed(), reason="the plugin is on the path, and not installed")
def test_a_program_that_imports_litellm_after_attaching_is_recorded(model, tmp_path):
    program = """
import sys
import lightning_openai
from lightning_spans import agent
with lightning_openai.attach(store="traces.db") as attachment:
    assert "litellm" not in sys.modules
    from litellm import completion
    with agent("writer"):
        completion("hosted_vllm/far", [{"role": "user", "content": "hello"}], api_base=sys.argv[1], api_key="k")
    assert attachment.flush(30)
from lightning_spans import open_store
print([span.agent for span in open_store("traces.db").spans() if span.operation == "chat"])
"""
    told = subprocess.run(
        [sys.executable, "-c", program, model.url], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert told.stdout.strip().endswith("['writer']"), told
