"""LiteLLM's own HTTP providers in a replay: their calls are given from the record, or asked at their own endpoint."""

from __future__ import annotations

import json
import os

import pytest

pytest.importorskip("openai")
pytest.importorskip("lightning_openai")
pytest.importorskip("litellm")
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "true"  # else it fetches prices when it is imported

import litellm
from pydantic import BaseModel

from lightning_conformance.plugins.script import Reply
from lightning_conformance.plugins.server import ScriptedServer
from lightning_spans import Attempt, agent, use_attempt
from lightning_spans.schema import spans as names
from lightning_spans.schema.replays import Replay
from lightning_trainer.gateway.settings import Routing
from support.fakes import FakeEngine, served
from support.gateway.litellm import USER, WAYS, chats, complete, complete_async, options, stream, stream_async

pytestmark = pytest.mark.usefixtures("recorder")
REASONED = {"temperature": 0.3, "reasoning_effort": "low", "top_p": 0.9, "stop": ["."], "extra_body": {"top_k": 5}}


class Verdict(BaseModel):
    """What a model is to answer."""

    good: bool


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with served(tmp_path_factory.mktemp("replay"), FakeEngine(version=7), routing=Routing(agents=("writer",))) as made:
        yield made


@pytest.fixture
def model():
    """The program's own endpoint, which never says the same twice."""
    said = iter(range(10**6))
    with ScriptedServer(lambda *_: Reply(f"answer {next(said)}")) as endpoint:
        yield endpoint


@pytest.fixture
def attempts(request, server, sink):
    """Give what records an attempt, and what replays it."""
    name = request.node.name

    def record(ask):
        with use_attempt(Attempt(name, name, endpoint=server.url, key=server.key(name), agents=("writer",))):
            found = _outcome(ask)
        server.store.add_spans(sink.spans)
        sink.taken.clear()
        return found

    def replay(ask, **asked):
        again = f"{name} {json.dumps(asked)}"
        made = Replay(attempt_id=name, **asked)
        key = server.key(again, replay=made)
        with use_attempt(Attempt(again, again, endpoint=server.url, key=key, agents=("writer",), replay=made)):
            return _outcome(ask)

    return record, replay


def _outcome(ask):
    with agent("reader"):
        try:
            return ask()
        except Exception as error:
            return type(error), str(error)


@pytest.mark.parametrize("provider", ["hosted_vllm", "openrouter", "deepseek", "openai"])
@pytest.mark.parametrize("ask", WAYS)
def test_a_call_is_given_from_the_record_and_its_endpoint_is_not_asked(ask, provider, attempts, model, sink):
    record, replay = attempts
    told = record(lambda: ask(**options(model, provider)))
    assert "answer" in told[:6], told
    assert replay(lambda: ask(**options(model, provider))) == told
    assert len(model.requests) == 1
    (span,) = chats(sink)
    assert (span.agent, span.status) == ("reader", "ok")
    assert span.attributes[names.REROUTED] is True


@pytest.mark.parametrize("provider", ["hosted_vllm", "openai"])
@pytest.mark.parametrize("ask", WAYS)
def test_the_forked_call_is_asked_at_its_own_endpoint_and_is_one_span(ask, provider, attempts, model, sink):
    record, replay = attempts
    told = record(lambda: ask(**options(model, provider)))
    again = replay(lambda: ask(**options(model, provider)), call=0)
    assert again != told
    assert "answer" in again[:6], again
    assert len(model.requests) == 2
    (span,) = chats(sink)
    assert span.status == "ok"
    assert names.REROUTED not in span.attributes
    assert again in span.attributes[names.RESPONSE]


@pytest.mark.parametrize("ask", [complete, complete_async, stream, stream_async])
def test_another_answer_stands_in_the_place_of_a_call(ask, attempts, model):
    record, replay = attempts
    record(lambda: ask(**options(model)))
    assert replay(lambda: ask(**options(model)), call=0, say="mine") == "mine"
    assert len(model.requests) == 1


@pytest.mark.parametrize("provider", ["hosted_vllm", "openrouter"])
def test_parameters_that_only_some_models_take_are_no_difference(provider, attempts, model):
    record, replay = attempts
    given = {**options(model, provider), **REASONED, "drop_params": True, "response_format": Verdict}
    told = record(lambda: complete(**given))
    assert "answer" in told[:6], told
    assert replay(lambda: complete(**given)) == told
    assert len(model.requests) == 1


def test_what_a_model_said_before_may_be_told_as_an_object(attempts, model):
    def talk():
        first = litellm.completion(messages=USER, **options(model)).choices[0].message
        more = [*USER, first, {"role": "user", "content": "go on"}]
        return litellm.completion(messages=more, **options(model)).choices[0].message.content

    record, replay = attempts
    assert record(talk) == replay(talk) == "answer 1"
    assert len(model.requests) == 2


def test_a_call_that_differs_ends_the_replay_with_its_reason(attempts, model):
    record, replay = attempts
    record(lambda: complete(**options(model)))
    other = [{"role": "user", "content": "goodbye"}]
    _, why = replay(lambda: litellm.completion(messages=other, **options(model)))
    assert "message 1 (user) differs" in why
    assert len(model.requests) == 1


@pytest.mark.parametrize("status", [400, 401, 404, 429, 500, 503])
@pytest.mark.parametrize("ask", [complete, complete_async, stream_async])
def test_a_call_that_failed_fails_in_the_same_way(ask, status, attempts):
    with ScriptedServer(lambda *_: Reply("no such luck", status=status)) as model:
        record, replay = attempts
        given = {**options(model), "max_retries": 0}
        kind, why = record(lambda: ask(**given))
        assert "no such luck" in why
        asked = len(model.requests)
        assert replay(lambda: ask(**given)) == (kind, why)
        assert len(model.requests) == asked


def test_an_endpoint_that_was_not_there_is_not_there_again(attempts):
    with ScriptedServer() as gone:
        given = {**options(gone), "max_retries": 0}
    record, replay = attempts
    kind, why = record(lambda: complete(**given))
    assert replay(lambda: complete(**given)) == (kind, why)
