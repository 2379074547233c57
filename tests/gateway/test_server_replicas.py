"""Policies behind upstreams: replicas, pauses, what each kind of server is asked, and whose calls go elsewhere."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from lightning_spans.adapter.adapt import adapt
from lightning_spans.adapter.trace import Trace
from lightning_trainer.gateway.http.serving import ServerThread
from lightning_trainer.gateway.settings import Routing
from lightning_trainer.gateway.upstream.replicas import Replicas
from lightning_trainer.gateway.upstream.upstream import Upstream, parse_upstream
from lightning_trainer.policies import parse
from lightning_trainer.reasons.call_errors import ENGINE_ENDED, ENGINE_WAIT
from lightning_trainer.rl.account import UntrainedReason
from lightning_trainer.rl.rows import why_untrainable
from support.fakes import FakeEngine, served

USER = [{"role": "user", "content": "hi"}]


class Behind:
    """A scripted server that keeps what it was asked."""

    def __init__(self, answer=None, *, owner="vllm"):
        self.owner = owner
        self.asked = []
        self.unlisted = []  # statuses with which the list of models is refused, one after the other
        self.answer = answer or (lambda body: JSONResponse(completion("ok")))
        routes = [Route("/v1/models", self._models)]
        paths = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/tokenize")
        routes += [Route(path, self._ask, methods=["POST"]) for path in paths]
        self.thread = ServerThread(Starlette(routes=routes))

    async def _models(self, request):
        if self.unlisted:
            return JSONResponse({"error": {"message": "not now"}}, self.unlisted.pop(0), {"retry-after": "7"})
        return JSONResponse({"object": "list", "data": [{"id": "m", "owned_by": self.owner}]})

    async def _ask(self, request):
        body = await request.json()
        self.asked.append((request.url.path, body))
        answer = self.answer(body)
        return await answer if asyncio.iscoroutine(answer) else answer

    def bodies(self):
        return [body for _, body in self.asked]


def completion(text, ids=(5, 6), **choice):
    content = [{"token": "x", "logprob": -0.5, "bytes": None, "top_logprobs": []} for _ in ids]
    made = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    made |= {"token_ids": list(ids), "logprobs": {"content": content}, **choice}
    return {"id": "x-1", "choices": [made], "prompt_token_ids": [1, 2], "usage": {"prompt_tokens": 2}}


@contextmanager
def gateway(folder, *behind, upstreams=None, **options):
    """A gateway over scripted servers: replicas of one model, unless `upstreams` makes others of their URLs."""
    with ExitStack() as stack:
        urls = []
        for each in behind:
            urls.append(f"{each.thread.start()}/v1")
            stack.callback(each.thread.stop)
        made = upstreams(urls) if upstreams else [Upstream("m", urls[0], replicas=tuple(urls[1:]))]
        routing = options.pop("routing", Routing(model="m"))
        front = stack.enter_context(served(folder, FakeEngine(), upstreams=made, routing=routing, **options))
        front.post = lambda body, attempt="a", path="/v1/chat/completions", **headers: httpx.post(
            f"{front.url}{path}",
            json={"model": "m", **body},
            headers={"authorization": f"Bearer {front.key(attempt)}", **headers},
            timeout=30,
        )
        front.admin = lambda path, body: httpx.post(
            f"{front.url}{path}",
            json=body,
            headers={"authorization": f"Bearer {front.keys.issue('admin')}"},
            timeout=30,
        )
        yield front


# Which replica.


def test_an_attempt_stays_with_its_replica_and_attempts_are_spread(tmp_path):
    behind = [Behind(), Behind(), Behind()]
    with gateway(tmp_path, *behind) as front:
        for turn in range(3):
            for attempt in range(6):
                messages = [{"role": "user", "content": f"{attempt} {turn}"}]
                front.post({"messages": messages}, attempt=f"attempt {attempt}")
        homes = [{body["messages"][0]["content"].split()[0] for body in each.bodies()} for each in behind]
    assert [len(each.asked) for each in behind] == [6, 6, 6]
    assert sum(len(home) for home in homes) == 6


def test_a_replica_that_is_down_is_left_for_another_and_found_again(tmp_path, monkeypatch):
    monkeypatch.setattr("lightning_trainer.gateway.upstream.upstream._PROBE_S", 0.05)
    first, second = Behind(), Behind()
    with gateway(tmp_path, first, second) as front:
        assert front.post({"messages": USER}).status_code == 200
        home, other = (first, second) if first.asked else (second, first)
        home.answer = lambda body: Response("overloaded", 503)
        assert front.post({"messages": USER}).status_code == 200
        assert len(other.asked) == 1
        home.answer = other.answer
        until = time.monotonic() + 60
        while httpx.get(f"{front.url}/healthz").json()["upstreams"]["m"]["well"] < 2:
            assert time.monotonic() < until
            time.sleep(0.05)
        assert [call.error for call in front.calls("a")] == [None, None]


def test_when_all_are_down_the_error_is_told_and_healthz_says_so(tmp_path):
    behind = [Behind(lambda body: Response("overloaded", 503)) for _ in range(2)]
    with gateway(tmp_path, *behind) as front:
        reply = front.post({"messages": USER})
        assert (reply.status_code, "overloaded" in reply.text) == (503, True)
        assert [len(each.asked) for each in behind] == [1, 1]
        health = httpx.get(f"{front.url}/healthz")
        assert (health.status_code, health.json()["upstreams"]["m"]["well"]) == (503, 0)
        assert len(front.calls("a")) == 1


def test_a_rollouts_call_waits_for_a_server_that_went_down(tmp_path, monkeypatch):
    monkeypatch.setattr("lightning_trainer.gateway.upstream.upstream._PROBE_S", 0.05)
    monkeypatch.setattr("lightning_trainer.gateway.upstream.ending.LONG_WAIT_S", 0.0)
    waits, went_on, some_healthy = threading.Event(), threading.Event(), Replicas.some_healthy

    async def noted(replicas, down_s):
        waits.set()
        await some_healthy(replicas, down_s)
        went_on.set()

    monkeypatch.setattr(Replicas, "some_healthy", noted)
    behind = Behind()
    with gateway(tmp_path, behind) as front, ThreadPoolExecutor() as other:
        assert front.post({"messages": USER}).status_code == 200
        up, behind.answer, behind.unlisted = behind.answer, lambda body: Response("gone", 503), [503] * 10_000
        assert front.post({"messages": USER}).status_code == 503, "it was in progress when the server went down"
        assert not waits.is_set()
        waiting = other.submit(front.post, {"messages": USER}, "b")
        assert waits.wait(60)
        assert httpx.get(f"{front.url}/healthz").status_code == 503
        assert not went_on.is_set()
        behind.answer, behind.unlisted = up, []
        assert waiting.result().status_code == 200
        assert front.calls("b")[0].sampling[ENGINE_WAIT] > 0


def test_no_call_waits_for_a_server_that_is_down_for_long_or_was_never_there(tmp_path, monkeypatch):
    behind = Behind()
    behind.unlisted = [503] * 3
    with gateway(tmp_path, behind) as front:
        assert front.post({"messages": USER}).status_code == 503
        assert front.post({"messages": USER}).status_code == 503, "nobody knows whether it will ever be there"
    monkeypatch.setattr("lightning_trainer.gateway.upstream.ending._DOWN_S", 0.0)
    behind, folder = Behind(), tmp_path / "long"
    folder.mkdir()
    with gateway(folder, behind) as front:
        assert front.post({"messages": USER}).status_code == 200
        behind.answer = lambda body: Response("gone", 503)
        assert [front.post({"messages": USER}).status_code for _ in range(2)] == [503, 503]


@pytest.mark.parametrize("stream", [False, True])
def test_nothing_is_asked_again_once_a_token_was_sent(tmp_path, stream):
    def breaks(body):
        async def pieces():
            yield b'data: {"choices": [{"index": 0, "delta": {"content": "x"}, "token_ids": [5]}]}\n\n'

        return StreamingResponse(pieces(), media_type="text/event-stream")

    behind = [Behind(breaks), Behind(breaks)]
    with gateway(tmp_path, *behind) as front:
        front.post({"messages": USER, "stream": stream})
        assert sum(len(each.asked) for each in behind) == 1
        (call,) = front.calls("a")
        assert call.error
        assert call.choices[0].token_ids == (5,)


def test_a_refusal_of_the_request_is_no_reason_to_ask_another(tmp_path):
    behind = [Behind(lambda body: JSONResponse({"error": {"message": "no"}}, 400)) for _ in range(2)]
    with gateway(tmp_path, *behind) as front:
        assert front.post({"messages": USER}).status_code == 400
        assert sum(len(each.asked) for each in behind) == 1
        assert httpx.get(f"{front.url}/healthz").status_code == 200


def test_a_failure_without_a_word_is_a_failure_all_the_same(tmp_path):
    behind = Behind(lambda body: JSONResponse({"error": {"message": "", "type": "InternalServerError"}}, 500))
    with gateway(tmp_path, behind) as front:
        assert "without a message" in front.post({"messages": USER}).json()["error"]["message"]
        assert "without a message" in front.calls("a")[0].error


def test_redirects_are_not_followed(tmp_path):
    inside = Behind()
    with gateway(
        tmp_path, Behind(lambda body: RedirectResponse(f"{inside.thread.start()}/v1/chat/completions", 307))
    ) as f:
        assert f.post({"messages": USER}).status_code == 307 or f.calls("a")[0].error
        inside.thread.stop()
    assert inside.asked == []


def test_time_limits_end_an_answer(tmp_path):
    ended = threading.Event()

    async def slow(body):
        await asyncio.to_thread(ended.wait, 60)
        return JSONResponse(completion("late"))

    def limited(urls):
        return [Upstream("m", urls[0], silence_s=0.3), Upstream("n", urls[0], total_s=0.3)]

    with gateway(tmp_path, Behind(slow), upstreams=limited) as front:
        for model in ("m", "n"):
            assert front.post({"messages": USER, "model": model}, attempt=model).status_code == 502
        ended.set()
        (silent,), (late,) = front.calls("m"), front.calls("n")
        assert silent.sampling[ENGINE_ENDED]
        assert ENGINE_ENDED not in late.sampling, "a policy can bring about that an answer takes too long"


def test_a_stream_that_falls_silent_ends_within_its_bound_and_one_that_goes_on_does_not(tmp_path):
    """The bound is on silence: an answer may take longer than it, as long as something comes."""
    gone = threading.Event()

    def lively(body):
        async def pieces():
            for _ in range(8):
                yield b'data: {"choices": [{"index": 0, "delta": {"content": "x"}}]}\n\n'
                await asyncio.sleep(0.15)
            if "for ever" not in body["messages"][0]["content"]:
                yield b'data: {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'
                return
            try:
                await asyncio.sleep(60)
            finally:
                gone.set()

        return StreamingResponse(pieces(), media_type="text/event-stream")

    def limited(urls):
        return [Upstream("m", urls[0], silence_s=1.0)]

    with gateway(tmp_path, Behind(lively), upstreams=limited) as front:
        whole = front.post({"messages": USER, "stream": True}).text
        assert whole.endswith("data: [DONE]\n\n")
        cut = front.post({"messages": [{"role": "user", "content": "for ever"}], "stream": True}, attempt="b").text
        assert cut.count('"x"') == 8
        assert "nothing arrived for 1 s" in cut
        assert gone.wait(60), "the upstream's answer is not read any more"
        (call,) = front.calls("b")
        assert "nothing arrived for 1 s" in call.error
        assert call.choices[0].message["content"] == "x" * 8


def test_homes_are_bounded_and_forgotten():
    replicas = Replicas(["a", "b"])
    for number in range(30_000):
        replicas.choose(f"attempt {number}")
    assert len(replicas._homes) == sum(replicas._homed.values()) == 20_000
    for number in range(30_000):
        replicas.forget(f"attempt {number}")
    assert sum(replicas._homed.values()) == 0


def test_replicas_are_named_in_one_option():
    found = parse_upstream("m=http://a:1, http://b:2/v2")
    assert (found.model, found.url, found.replicas) == ("m", "http://a:1/v1", ("http://b:2/v2",))


# What kind of server it is.


def tokens(front, attempt="a"):
    return [call.choices[0].token_ids if call.choices else None for call in front.calls(attempt)]


@pytest.mark.parametrize("status", [400, 408, 429, 500])
def test_a_list_of_models_that_fails_once_costs_one_call_and_no_tokens(tmp_path, status):
    behind = Behind()
    behind.unlisted = [status]
    with gateway(tmp_path, behind) as front:
        refused = front.post({"messages": USER})
        assert (refused.status_code, refused.headers["retry-after"]) == (status, "7")
        assert f"/v1/models answered {status}: not now" in refused.json()["error"]["message"]
        assert front.post({"messages": USER}).status_code == 200
        assert tokens(front) == [None, (5, 6)]


def test_a_list_of_models_that_is_elsewhere_is_an_error_that_says_so(tmp_path):
    behind = Behind()
    behind.unlisted = [307]
    with gateway(tmp_path, behind) as front:
        refused = front.post({"messages": USER})
    assert (refused.status_code, "redirects are not followed" in refused.text) == (502, True)


@pytest.mark.parametrize("again_s", [60.0, 0.0])
@pytest.mark.parametrize("status", [401, 403, 404, 405])
def test_a_server_without_a_list_of_models_serves_and_is_asked_for_one_again(
    tmp_path, monkeypatch, caplog, status, again_s
):
    monkeypatch.setattr("lightning_trainer.gateway.upstream.connection._AGAIN_S", again_s)
    behind = Behind(lambda body: JSONResponse(completion("ok", ids=(5, 6) if "return_token_ids" in body else ())))
    behind.unlisted = [status, status]
    with gateway(tmp_path, behind) as front, caplog.at_level(logging.WARNING):
        assert [front.post({"messages": USER}).status_code for _ in range(4)] == [200] * 4
        assert tokens(front) == ([None] * 4 if again_s else [None, None, (5, 6), (5, 6)])
    assert caplog.text.count(f"/v1/models answered {status}, so this server counts as one that sends no") == 1


def test_a_key_that_opens_nothing_is_told_in_the_servers_words(tmp_path):
    behind = Behind(lambda body: JSONResponse({"error": {"message": "wrong key"}}, 401))
    behind.unlisted = [401]
    with gateway(tmp_path, behind) as front:
        refused = front.post({"messages": USER})
    assert (refused.status_code, refused.json()["error"]["message"]) == (401, "wrong key")


def test_a_replica_that_lost_its_list_of_models_is_not_well_and_stays_what_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr("lightning_trainer.gateway.upstream.upstream._PROBE_S", 0.05)
    behind = Behind()
    with gateway(tmp_path, behind) as front:
        front.post({"messages": USER})
        well, behind.answer = behind.answer, lambda body: Response("starting", 503)
        behind.unlisted = [404, 405] * 5
        assert front.post({"messages": USER}).status_code == 503
        until = time.monotonic() + 60
        while behind.unlisted:
            health = httpx.get(f"{front.url}/healthz").json()["upstreams"]["m"]["well"]
            assert (health, time.monotonic() < until) == (0, True) or not behind.unlisted
            time.sleep(0.02)
        behind.answer = well
        assert front.post({"messages": USER}).status_code == 200
        assert tokens(front) == [(5, 6), None, (5, 6)]


# While weights change.


def test_pause_waits_for_calls_under_way_and_holds_the_others_until_resume(tmp_path):
    going, may_end = threading.Event(), threading.Event()

    async def slow(body):
        going.set()
        while not may_end.is_set():
            await asyncio.sleep(0.01)
        return JSONResponse(completion("ok"))

    with gateway(tmp_path, Behind(slow), routing=Routing(model="m", versions={"m": 4})) as front:
        threads = [threading.Thread(target=front.post, args=({"messages": USER},)) for _ in range(2)]
        threads[0].start()
        assert going.wait(60)
        assert front.admin("/api/policies/pause", {"model": "m", "drain_s": 0.1}).json()["in_flight"] == 1
        threads[1].start()
        may_end.set()
        threads[0].join(60)
        drained = front.admin("/api/policies/pause", {"model": "m", "drain_s": 5}).json()
        assert (drained["in_flight"], drained["paused"]) == (0, True)
        assert len(front.calls("a")) == 1
        assert front.admin("/api/policies/resume", {"model": "m", "version": 5}).json()["version"] == 5
        threads[1].join(60)
        assert sorted(call.policy_version for call in front.calls("a")) == [4, 5]


def test_a_pause_that_does_not_end_is_an_error(tmp_path):
    with gateway(tmp_path, Behind(), upstreams=lambda urls: [Upstream("m", urls[0], paused_s=0.1)]) as front:
        front.admin("/api/policies/pause", {"model": "m", "drain_s": 0})
        reply = front.post({"messages": USER})
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "paused")


def test_only_an_admin_pauses(tmp_path):
    with gateway(tmp_path, Behind()) as front:
        for path in ("/api/policies/pause", "/api/policies/resume"):
            assert front.post({"model": "m"}, path=path).status_code == 403
        assert front.admin("/api/policies/pause", {"model": "other"}).status_code == 404
        assert front.admin("/api/policies/pause", {"model": "m", "drain": 1}).status_code == 400
        assert front.post({"messages": USER}).status_code == 200


# What each kind of server is asked.


def test_an_attempts_calls_carry_every_parameter_and_a_seed(tmp_path):
    behind = Behind()
    with gateway(tmp_path, behind, routing=Routing(model="m", seed=5, max_tokens=9)) as front:
        for attempt in ("a", "a", "b"):
            front.post({"messages": USER, "stop": ["x"], "logit_bias": {"5": 1}}, attempt=attempt)
        sampling = front.calls("a")[0].sampling
    first, second, other = behind.bodies()
    for name, value in sampling.items():
        assert first[name] == value
    assert (first["max_tokens"], first["top_k"], first["temperature"], first["stop"]) == (9, -1, 1.0, ["x"])
    assert first["seed"] != second["seed"]
    assert 0 <= first["seed"] < 2**31
    assert other["seed"] != first["seed"]


@pytest.mark.parametrize("owner", ["vllm", "sglang"])
def test_log_probabilities_without_the_temperature_are_found_out_said_and_not_trained(tmp_path, caplog, owner):
    def answers(raw):
        def answer(body):
            if "prompt" not in body:
                return JSONResponse(completion("ok"))
            logprob = -1.0 if raw else -1.0 * body["temperature"]
            told = {"tokens": ["a"], "token_logprobs": [logprob], "top_logprobs": [{"a": logprob}]}
            return JSONResponse({"choices": [{"index": 0, "text": "a", "logprobs": told, "finish_reason": "stop"}]})

        return answer

    for raw in (True, False):
        behind = Behind(answers(raw), owner=owner)
        folder = tmp_path / str(raw)
        folder.mkdir()
        with gateway(folder, behind) as front, caplog.at_level(logging.WARNING):
            caplog.clear()
            for temperature in (1.0, 0.7, 0.7):
                front.post({"messages": USER, "temperature": temperature})
            flags = [call.sampling.get("logprobs_temperature") for call in front.calls("a")]
            trained = [why_untrainable(each) for each in adapt(Trace.build([], front.calls("a")))]
        assert flags == ([None, 1.0, 1.0] if raw else [None] * 3)
        assert trained == ([None] + [UntrainedReason.OTHER_TEMPERATURE] * 2 if raw else [None] * 3)
        assert ("processed_logprobs" in caplog.text) is raw
        assert len(behind.asked) == 5


@pytest.mark.parametrize("raw", [True, False])
def test_log_probabilities_without_the_temperature_are_found_out_through_another_gateway(tmp_path, raw):
    def answer(body):
        if "prompt" not in body:
            return JSONResponse(completion("ok"))
        logprob = -1.0 if raw else -1.0 * body["temperature"]
        told = {"tokens": ["a"], "token_logprobs": [logprob], "top_logprobs": [{"a": logprob}]}
        return JSONResponse({"choices": [{"index": 0, "text": "a", "logprobs": told, "finish_reason": "stop"}]})

    for name in ("near", "far"):
        (tmp_path / name).mkdir()
    with gateway(tmp_path / "near", Behind(answer)) as near:
        upstream = Upstream("m", f"{near.url}/v1", key=near.keys.issue("admin"))
        with gateway(tmp_path / "far", upstreams=lambda _: [upstream]) as far:
            assert far.post({"messages": USER, "temperature": 0.5}).status_code == 200
            (call,) = far.calls("a")
    assert call.choices[0].token_ids == (5, 6)
    assert call.sampling.get("logprobs_temperature") == (1.0 if raw else None)
    assert [why_untrainable(each) for each in adapt(Trace.build([], [call]))] == [
        UntrainedReason.OTHER_TEMPERATURE if raw else None
    ]


def test_a_gateway_with_its_own_engine_gives_log_probabilities_at_the_temperature(tmp_path):
    (tmp_path / "near").mkdir()
    with served(tmp_path / "near", FakeEngine(model="m")) as near:
        upstream = Upstream("m", f"{near.url}/v1", key=near.keys.issue("admin"))
        with gateway(tmp_path, upstreams=lambda _: [upstream]) as far:
            assert far.post({"messages": USER, "temperature": 0.5}).status_code == 200
            (call,) = far.calls("a")
    assert call.choices[0].logprobs
    assert "logprobs_temperature" not in call.sampling


def test_a_gateway_before_a_server_that_completes_no_texts_serves_at_every_temperature(tmp_path):
    def answer(body):
        return Response("no such page", 404) if "prompt" in body else JSONResponse(completion("ok", ids=()))

    (tmp_path / "near").mkdir()
    with gateway(tmp_path / "near", Behind(answer, owner="somebody")) as near:
        upstream = Upstream("m", f"{near.url}/v1", key=near.keys.issue("admin"))
        with gateway(tmp_path, upstreams=lambda _: [upstream]) as far:
            assert far.post({"messages": USER, "temperature": 0.5}).status_code == 200
            assert "logprobs_temperature" not in far.calls("a")[0].sampling


def test_a_server_that_says_it_is_vllm_and_has_no_completions_is_explained(tmp_path):
    def answer(body):
        if "prompt" in body:
            return JSONResponse({"detail": "Not Found"}, 404)
        return JSONResponse(completion("ok"))

    with gateway(tmp_path, Behind(answer, owner="vllm")) as front:
        assert front.post({"messages": USER, "temperature": 1.0}).status_code == 200
        refused = front.post({"messages": USER, "temperature": 0.7})
    assert refused.status_code == 404
    told = refused.json()["error"]["message"]
    assert "is vLLM or SGLang, but has no" in told
    assert "/v1/completions" in told
    assert "Not Found" in told


def sglang(body):
    """As SGLang answers: tokens with each choice, whole replies only."""
    if body.get("stream"):
        return JSONResponse({"object": "error", "message": "return_token_ids is not supported with stream"}, 400)
    reply = completion("Hello.", prompt_token_ids=[1, 2], matched_stop=None)
    del reply["prompt_token_ids"]
    return JSONResponse(reply)


@pytest.mark.parametrize("stream", [False, True])
def test_sglang_is_asked_as_it_answers(tmp_path, stream):
    behind = Behind(sglang, owner="sglang")
    with gateway(tmp_path, behind) as front:
        reply = front.post(
            {"messages": USER, "stream": stream, "stream_options": {"include_usage": True} if stream else None}
        )
        (call,) = front.calls("a")
    assert call.error is None
    assert (call.prompt_token_ids, call.choices[0].token_ids) == ((1, 2), (5, 6))
    assert call.choices[0].logprobs == (-0.5, -0.5)
    assert behind.bodies()[0]["return_token_ids"] is True
    assert "token_ids" not in reply.text
    if stream:
        chunks = [json.loads(line[6:]) for line in reply.text.split("\n\n")[:-2]]
        assert chunks[0]["choices"][0]["delta"]["content"] == "Hello."
        assert chunks[-1]["usage"] == {"prompt_tokens": 2}
        assert reply.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("owner", ["vllm", "sglang", "somebody"])
def test_completions_go_to_the_servers_own_path(tmp_path, owner):
    told = {"tokens": ["a"], "token_logprobs": [-0.5], "top_logprobs": [{"a": -0.5, "b": -2.0}], "text_offset": [0]}
    choice = {"index": 0, "text": "a", "logprobs": told, "finish_reason": "length", "token_ids": [7]}
    behind = Behind(lambda body: JSONResponse({"choices": [{**choice, "prompt_token_ids": [3]}]}), owner=owner)
    with gateway(tmp_path, behind) as front:
        reply = front.post({"prompt": "once", "logprobs": 2, "max_tokens": 1}, path="/v1/completions").json()
        (call,) = front.calls("a")
    ((path, body),) = behind.asked
    assert (path, body["prompt"], body["logprobs"]) == ("/v1/completions", "once", 2)
    assert reply["choices"][0]["text"] == "a"
    assert reply["choices"][0]["logprobs"]["top_logprobs"] == [{"a": -0.5, "b": -2.0}]
    assert (call.prompt_token_ids, call.choices[0].token_ids, call.choices[0].logprobs) == ((3,), (7,), (-0.5,))


def test_images_tools_and_schemas_pass_through(tmp_path):
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    behind = Behind()
    with gateway(tmp_path, behind) as front:
        front.post({"messages": [{"role": "user", "content": [image]}], "response_format": schema})
        source = {"type": "base64", "media_type": "image/png", "data": "AA=="}
        blocks = [{"type": "image", "source": source}, {"type": "text", "text": "what is this?"}]
        tools = [{"name": "t", "input_schema": {"type": "object"}}]
        body = {"messages": [{"role": "user", "content": blocks}], "max_tokens": 9, "tools": tools}
        front.post({**body, "tool_choice": {"type": "tool", "name": "t"}}, path="/v1/messages")
        parts = [{"type": "input_image", "image_url": "data:image/png;base64,AA=="}]
        front.post({"input": [{"role": "user", "content": parts}]}, path="/v1/responses")
        assert all(call.error is None for call in front.calls("a"))
    chat, messages, responses = behind.bodies()
    assert chat["response_format"] == schema
    for body in (chat, messages, responses):
        assert body["messages"][0]["content"][0] == image
    assert messages["tool_choice"] == {"type": "function", "function": {"name": "t"}}


def test_reasoning_is_a_block_of_its_own(tmp_path):
    message = {"role": "assistant", "content": "19", "reasoning_content": "12 and 7."}
    with gateway(tmp_path, Behind(lambda body: JSONResponse(completion("", message=message)))) as front:
        asked = {"messages": USER, "max_tokens": 9, "thinking": {"type": "adaptive"}}
        told = front.post(asked, path="/v1/messages").json()["content"]
        items = front.post({"input": "hi"}, path="/v1/responses").json()["output"]
    assert [block["type"] for block in told] == ["thinking", "text"]
    assert [item["type"] for item in items] == ["reasoning", "message"]
    assert items[0]["content"][0]["text"] == "12 and 7."


def test_a_forced_call_that_a_server_says_was_stopped_is_tool_use(tmp_path):
    calls = [{"id": "c", "type": "function", "function": {"name": "t", "arguments": "{}"}}]
    message = {"role": "assistant", "content": None, "tool_calls": calls}
    with gateway(tmp_path, Behind(lambda body: JSONResponse(completion("", message=message)))) as front:
        told = front.post({"messages": USER, "max_tokens": 9}, path="/v1/messages").json()
    assert (told["stop_reason"], told["content"][0]["name"]) == ("tool_use", "t")


def test_embeddings_and_token_counts_pass_through_and_are_no_calls(tmp_path):
    def answer(body):
        return JSONResponse({"count": 7} if "messages" in body else {"object": "list", "data": [{"embedding": [0.5]}]})

    behind = Behind(answer)
    with gateway(tmp_path, behind) as front:
        assert front.post({"input": "x"}, path="/v1/embeddings").json()["data"][0]["embedding"] == [0.5]
        assert front.post({"messages": USER}, path="/v1/messages/count_tokens").json() == {"input_tokens": 7}
        assert front.calls("a") == []
    assert [path for path, _ in behind.asked] == ["/v1/embeddings", "/tokenize"]


def test_adapters_are_asked_by_their_names(tmp_path):
    behind = Behind()
    with gateway(
        tmp_path, behind, upstreams=lambda urls: [Upstream("writer", urls[0]), Upstream("judge", urls[0])]
    ) as front:
        for model in ("writer", "judge"):
            front.post({"messages": USER, "model": model})
        assert [call.policy for call in front.calls("a")] == ["writer", "judge"]
    assert [body["model"] for body in behind.bodies()] == ["writer", "judge"]


# Agents that are not trained.


def test_embeddings_come_from_the_requested_model_whichever_agent_requests_them(tmp_path):
    behind = Behind(lambda body: JSONResponse({"object": "list", "data": [{"embedding": [0.5]}]}))

    def two(urls):
        return [Upstream("m", urls[0]), Upstream("embedder", urls[0])]

    routing = Routing(model="m", policies=parse({"writer": "lora:m"}))
    with gateway(tmp_path, behind, upstreams=two, routing=routing) as front:
        for agent in ("writer", "judge"):
            asked = {"model": "embedder", "input": "x"}
            assert front.post(asked, path="/v1/embeddings", **{"x-lightning-agent": agent}).status_code == 200
        refused = front.post({"model": "other", "input": "x"}, path="/v1/embeddings")
        assert refused.status_code == 404
        assert "base_url" in refused.json()["error"]["message"]
    assert [body["model"] for body in behind.bodies()] == ["embedder", "embedder"]


@pytest.mark.parametrize("recorded", [True, False])
def test_agents_that_are_not_trained_go_to_their_own_provider(tmp_path, recorded):
    ours, theirs = Behind(), Behind(owner="somebody")

    def one(urls):
        return [Upstream("m", urls[0])]

    with ExitStack() as stack:
        url = f"{theirs.thread.start()}/v1"
        stack.callback(theirs.thread.stop)
        options = {"provider": Upstream("provider", url, key="sk-own", any_model=True), "record_untrained": recorded}
        routing = Routing(model="m", agents=("writer",))
        front = stack.enter_context(gateway(tmp_path, ours, upstreams=one, routing=routing, **options))
        for agent in ("writer", "judge"):
            reply = front.post({"messages": USER, "model": "gpt-4o"}, **{"x-lightning-agent": agent})
            assert reply.status_code == 200
        front.post({"messages": USER, "model": "gpt-4o"})  # named by nothing: answered as before
        kept = [(call.agent, call.policy) for call in front.calls("a")]
    assert [body["model"] for body in ours.bodies()] == ["m", "m"]
    assert [body["model"] for body in theirs.bodies()] == ["gpt-4o"]
    judged = [("judge", "gpt-4o")] if recorded else []
    assert kept == [("writer", "m"), *judged, (None, "m")]


def test_a_seed_of_the_programs_differs_from_rollout_to_rollout_in_training(tmp_path):
    behind = Behind()
    with gateway(tmp_path, behind, routing=Routing(model="m", seed=5)) as front:
        for attempt in ("a", "b"):
            front.post({"messages": USER, "seed": 42}, attempt=attempt)
        sampling = front.calls("a")[0].sampling
    assert len({body["seed"] for body in behind.bodies()} | {42}) == 3
    assert sampling["seed_asked"] == 42


def test_an_upstream_draws_plainly_in_training_where_that_is_asked(tmp_path):
    behind = Behind()
    with gateway(tmp_path, behind, routing=Routing(model="m", plain=True)) as front:
        front.post(
            {"messages": USER, "top_p": 0.9, "top_k": 5, "presence_penalty": 1, "logit_bias": {"5": 1}}, attempt="a"
        )
        sampling = front.calls("a")[0].sampling
    (body,) = behind.bodies()
    assert (body["top_p"], body["top_k"], body["presence_penalty"], body["logit_bias"]) == (1.0, 0, 0.0, {"5": 1})
    assert (sampling["top_p_asked"], sampling["top_k_asked"], sampling["presence_penalty_asked"]) == (0.9, 5, 1)


def test_a_field_that_nobody_knows_is_refused_and_not_sent_on(tmp_path):
    behind = Behind()
    with gateway(tmp_path, behind) as front:
        reply = front.post({"messages": USER, "draw_backwards": True}, attempt="a")
        assert reply.status_code == 400
        assert "draw_backwards" in reply.text
        assert behind.bodies() == []
        assert front.post({"messages": USER, "allowed_token_ids": [5]}, attempt="a").status_code == 200
        assert front.calls("a")[-1].request["allowed_token_ids"] == [5]
