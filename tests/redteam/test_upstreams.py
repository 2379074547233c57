"""An upstream that the attacker owns: what it answers must neither break the gateway nor enter training."""

from __future__ import annotations

import asyncio
import gzip
import json
import time
from contextlib import contextmanager

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from lightning_spans.adapter.adapt import adapt
from lightning_spans.adapter.trace import Trace
from lightning_spans.chat.stream import EventReader
from lightning_spans.schema.calls import Call
from lightning_trainer.gateway.http.serving import ServerThread
from lightning_trainer.gateway.upstream import connection
from lightning_trainer.gateway.upstream.upstream import Upstream
from lightning_trainer.rl.rows import why_untrainable
from support.fakes import FakeEngine, served
from support.gateway.surfaces import SURFACES

MODELS = {"data": [{"id": "policy", "owned_by": "vllm"}]}


@contextmanager
def rogue(tmp_path, answer, *, host="127.0.0.1", **options):
    """A gateway before an upstream that answers so; gives its url, a key, and the calls that were recorded."""

    async def models(_):
        return JSONResponse(MODELS)

    async def anything(request):
        made = answer(request)
        return await made if asyncio.iscoroutine(made) else made

    routes = [Route("/v1/models", models), Route("/{path:path}", anything, methods=["POST", "GET"])]
    behind = ServerThread(Starlette(routes=routes))
    url = behind.start().replace("127.0.0.1", host)
    upstream = Upstream("policy", f"{url}/v1", key="the upstream's own key", **options)
    try:
        with served(tmp_path, FakeEngine(model="other"), upstreams=[upstream]) as front:
            yield front
    finally:
        behind.stop()


def ask(front, path="/v1/chat/completions", **more) -> httpx.Response:
    headers = {"authorization": f"Bearer {front.key('a')}"}
    body = {**SURFACES[path]("hi"), **more}
    return httpx.post(f"{front.url}{path}", json=body, headers=headers, timeout=30)


def completion(**choice) -> dict:
    message = {"role": "assistant", "content": "hi"}
    one = {"index": 0, "message": message, "finish_reason": "stop", **choice}
    return {"id": "r", "object": "chat.completion", "model": "policy", "created": 1, "choices": [one]}


def is_well(front) -> bool:
    return ask(front, model="other").status_code == 200


def trained(calls: list[Call]) -> list[str | None]:
    return [why_untrainable(transition) for transition in adapt(Trace.build([], calls))]


@pytest.mark.parametrize("path", SURFACES)
def test_a_redirect_is_not_followed(tmp_path, path):
    seen = []

    def answer(request):
        seen.append(request.url.path)
        return RedirectResponse("/secret/metadata", 307)

    with rogue(tmp_path, answer) as front:
        assert ask(front, path).status_code == 502
    assert "/secret/metadata" not in seen


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_without_end_is_cut(tmp_path, monkeypatch, stream):
    monkeypatch.setattr(connection, "MOST_BYTES", 300_000)

    async def endless():
        chunk = {**completion(), "choices": [{"index": 0, "delta": {"content": "x" * 1000}}]}
        while True:
            yield b"data: " + json.dumps(chunk).encode() + b"\n\n" if stream else b" " * 10_000
            await asyncio.sleep(0)

    kind = "text/event-stream" if stream else "application/json"
    with rogue(tmp_path, lambda _: StreamingResponse(endless(), media_type=kind)) as front:
        reply = ask(front, stream=stream)
        assert "more than 300000 bytes" in reply.text
        assert is_well(front)
        assert front.calls("a")[0].error is not None


def test_an_event_without_end_is_cut(tmp_path, monkeypatch):
    monkeypatch.setattr(EventReader.__init__, "__defaults__", (100_000,))

    async def endless():
        yield b"data: "
        while True:
            yield b"x" * 10_000
            await asyncio.sleep(0)

    with rogue(tmp_path, lambda _: StreamingResponse(endless(), media_type="text/event-stream")) as front:
        assert "error" in ask(front, stream=True).text
        assert is_well(front)


def test_an_event_that_is_too_large_is_the_upstreams_fault(tmp_path, monkeypatch):
    monkeypatch.setattr(EventReader.__init__, "__defaults__", (100_000,))
    large = b"data: " + b"x" * 200_000
    with rogue(tmp_path, lambda _: Response(large, media_type="text/event-stream")) as front:
        assert ask(front, stream=True).status_code == 502
        assert front.calls("a")[0].error.startswith("the model's server sent an event of more than")


@pytest.mark.parametrize("status", [600, 799, 999])
def test_a_status_that_http_does_not_have_is_the_upstreams_fault(tmp_path, status):
    with rogue(tmp_path, lambda _: Response(b"odd", status)) as front:
        assert ask(front).status_code == 502
        assert is_well(front)


def test_an_event_in_small_pieces_costs_no_more_than_it_has_bytes():
    reader, searched = EventReader(), []

    class Counted(bytearray):
        def find(self, end, begin=0):
            searched.append(len(self) - begin)
            return super().find(end, begin)

    reader._rest = Counted()
    pieces = [b"data: ", *[b"x" * 100] * 1_000, b"\r", b"\n\r\n"]
    assert [reader.feed(piece) for piece in pieces][-1] == [b"x" * 100_000]
    assert sum(searched) < 3 * 100_000


OF_OWNERS = {
    "priority": -100, "cache_salt": "s", "request_id": "r", "rid": "r", "logits_processors": ["os.system"],
    "custom_logit_processor": "gASV", "custom_params": {"a": 1}, "chat_template": "{{ 1 }}", "documents": [{"a": "b"}],
    "mm_processor_kwargs": {"num_crops": 9},
}  # fmt: skip


@pytest.mark.parametrize("name", OF_OWNERS)
def test_an_attempt_says_nothing_that_is_for_the_servers_owner(tmp_path, name):
    seen = []

    def answer(request):
        seen.append(request.url.path)
        return JSONResponse(completion())

    with rogue(tmp_path, answer) as front:
        reply = ask(front, **{name: OF_OWNERS[name]})
        assert (reply.status_code, name in reply.text) == (400, True)
        assert seen == []
        assert ask(front, **{name: None}).status_code == 200


def test_a_compressed_bomb_is_not_unpacked(tmp_path):
    bomb = gzip.compress(b" " * 20_000_000)
    with rogue(tmp_path, lambda _: Response(bomb, headers={"content-encoding": "gzip"})) as front:
        reply = ask(front)
        assert reply.status_code == 502
        assert "compressed" in reply.text


@pytest.mark.parametrize("stream", [False, True])
def test_silence_is_not_waited_for_for_ever(tmp_path, stream):
    async def silent():
        yield b"data: "
        await asyncio.sleep(60)

    began = time.monotonic()
    answer = lambda _: StreamingResponse(silent(), media_type="text/event-stream" if stream else "application/json")  # noqa: E731
    with rogue(tmp_path, answer, silence_s=0.3) as front:
        assert "error" in ask(front, stream=stream).text
        assert time.monotonic() - began < 20
        assert is_well(front)


MALFORMED = [
    b"", b"{", b"[]", b"null", b'"x"', b'{"choices": null}', b'{"choices": [null]}', b'{"choices": [[]]}',
    b'{"choices": [{"index": "a", "message": {}}]}', b'{"choices": [{"index": 99999999, "message": {"content": "x"}}]}',
    b'{"choices": [{"index": -1, "message": {"content": "x"}}]}', b'{"choices": [{"message": "text"}]}',
    b'{"choices": [{"message": {"tool_calls": [3]}}]}', b'{"choices": [{"message": {"tool_calls": [{"index": {}}]}}]}',
    b'{"choices": [{"message": {"tool_calls": [{"function": {"name": 3, "arguments": {}}}]}}]}',
    b"[" * 100_000, b'{"error": {"message": {"a": []}, "type": 3}}', b'{"error": 7}', b"\xff\xfe\x00",
]  # fmt: skip


@pytest.mark.parametrize("path", SURFACES)
def test_malformed_answers_are_an_error_that_names_the_upstream_and_break_nothing(tmp_path, path):
    bodies = iter(MALFORMED)

    def answer(request):
        if request.method == "GET":  # after an error, the gateway asks for the server's health
            return Response(status_code=404)
        return Response(next(bodies), media_type="application/json")

    with rogue(tmp_path, answer) as front:
        for body in MALFORMED:
            reply = ask(front, path)
            assert reply.status_code in {200, 502}, (body, reply.text)
            if reply.status_code == 502:
                assert "error" in reply.json()
        assert is_well(front)
        assert all(reason is not None for reason in trained(front.calls("a")[: len(MALFORMED)]))


@pytest.mark.parametrize(
    "ids", [[-1], [2**31], [1.5], ["1"], [True], [None], [[1]], {"0": 1}, "12", [10**30]], ids=lambda ids: str(ids)[:12]
)
def test_what_is_no_token_id_never_enters_training(tmp_path, ids):
    logprobs = {"content": [{"token": "a", "logprob": -0.1}]}
    body = {**completion(token_ids=ids, logprobs=logprobs), "prompt_token_ids": [1, 2]}
    wrong_prompt = {**completion(token_ids=[5], logprobs=logprobs), "prompt_token_ids": ids}
    answers = iter([body, wrong_prompt])
    with rogue(tmp_path, lambda _: JSONResponse(next(answers))) as front:
        for _ in range(2):
            ask(front)
        assert all(reason is not None for reason in trained(front.calls("a")))


@pytest.mark.parametrize("logprob", ["0", None, float("nan"), float("inf"), 10**400, [], True])
def test_what_is_no_log_probability_never_enters_training(tmp_path, logprob):
    body = completion(token_ids=[5], logprobs={"content": [{"token": "a", "logprob": logprob}]})
    text = json.dumps({**body, "prompt_token_ids": [1, 2]})
    with rogue(tmp_path, lambda _: Response(text, media_type="application/json")) as front:
        ask(front)
        assert all(reason is not None for reason in trained(front.calls("a")))


def test_the_agents_key_and_headers_never_reach_it(tmp_path):
    seen = []

    def answer(request):
        seen.append(dict(request.headers))
        return JSONResponse(completion())

    with rogue(tmp_path, answer) as front:
        key = front.key("a")
        headers = {"authorization": f"Bearer {key}", "cookie": "session=1", "x-api-key": key}
        httpx.post(f"{front.url}/v1/chat/completions", json=SURFACES["/v1/chat/completions"]("hi"), headers=headers)
        assert all(key[:20] not in str(each) for each in seen)
    assert {each.get("authorization") for each in seen} == {"Bearer the upstream's own key"}
    assert not any("cookie" in each for each in seen)


@pytest.mark.parametrize("path", SURFACES)
def test_an_agent_can_not_choose_where_its_call_goes(tmp_path, path):
    """A URL as model, as header or in the body is a name like any other: there is nothing to reroute with."""
    inside = []

    async def secret(_):
        inside.append(1)
        return JSONResponse(completion())

    internal = ServerThread(Starlette(routes=[Route("/{path:path}", secret, methods=["POST", "GET"])]))
    url = internal.start()
    try:
        with rogue(tmp_path, lambda _: JSONResponse(completion())) as front:
            for more in (
                {"model": url},
                {"model": f"policy={url}"},
                {"base_url": url},
                {"api_base": url},
                {"endpoint": url},
            ):
                ask(front, path, **more)
            headers = {
                "authorization": f"Bearer {front.key('a')}",
                "x-upstream": url,
                "x-forwarded-host": url,
                "forwarded": url,
            }
            httpx.post(f"{front.url}{path}", json=SURFACES[path]("hi"), headers=headers)
            target = front.url.removeprefix("http://")
            import socket

            host, _, port = target.partition(":")
            with socket.create_connection((host, int(port)), timeout=60) as direct:  # as if to a forward proxy
                direct.sendall(f"GET {url}/secret HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
                assert b" 200 " not in direct.recv(4096)[:15]
    finally:
        internal.stop()
    assert inside == []


def test_a_claim_under_a_strange_host_gives_agents_no_strange_endpoint(tmp_path):
    from lightning_spans.schema.attempts import Rollout

    with served(tmp_path) as running:
        running.store.enqueue([Rollout(rollout_id="r", group_id="g", task={})])
        headers = {"authorization": f"Bearer {running.keys.issue('runner')}", "host": "evil.example"}
        assert httpx.post(f"{running.url}/api/claims", json={"worker": "w"}, headers=headers).status_code == 421
        headers = {**headers, "host": "localhost", "x-forwarded-host": "evil.example", "x-forwarded-proto": "https"}
        (attempt,) = httpx.post(f"{running.url}/api/claims", json={"worker": "w"}, headers=headers).json()["attempts"]
        assert "evil" not in attempt["context"]["endpoint"]


def test_a_cookie_that_it_sets_goes_out_with_no_other_attempts_call(tmp_path):
    seen = []

    def answer(request):
        seen.append(request.headers.get("cookie"))
        return JSONResponse(completion(), headers={"set-cookie": "attempt=a; Path=/"})

    with rogue(tmp_path, answer, host="localhost") as front:  # of a bare address no client keeps cookies
        for attempt in ("a", "b"):
            headers = {"authorization": f"Bearer {front.key(attempt)}"}
            body = SURFACES["/v1/chat/completions"]("hi")
            assert httpx.post(f"{front.url}/v1/chat/completions", json=body, headers=headers).is_success
    assert seen == [None, None]


@pytest.mark.parametrize(
    ("sent", "told"),
    [("7", "7"), ("Wed, 21 Oct 2026 07:28:00 GMT", "Wed, 21 Oct 2026 07:28:00 GMT"), ("so\u00f6n", None), ("-1", None)],
)
def test_an_odd_retry_after_is_not_passed_on(tmp_path, sent, told):
    def busy(_):
        reply = JSONResponse({"error": {"message": "busy"}}, 429)
        reply.raw_headers.append((b"retry-after", sent.encode()))
        return reply

    with rogue(tmp_path, busy) as front:
        reply = ask(front)
        assert (reply.status_code, reply.headers.get("retry-after")) == (429, told)
        assert is_well(front)


@pytest.mark.parametrize("levels", [110, 900, 100_000])
def test_a_very_deep_reply_is_its_error(tmp_path, levels):
    deep = b"[" * levels + b"]" * levels
    whole = json.dumps(completion(extra=0)).encode().replace(b'"extra": 0', b'"extra": ' + deep)
    replies = {False: (whole, "application/json"), True: (b"data: " + whole + b"\n\n", "text/event-stream")}

    def reply(request):
        body, kind = replies[front.streams]
        return Response(body, media_type=kind)

    with rogue(tmp_path, reply) as front:
        for front.streams in (False, True):
            assert ask(front, stream=front.streams).status_code == 502
            assert is_well(front)


@pytest.mark.parametrize("reason", [{}, [1], 7, True])
def test_a_finish_reason_that_is_no_text_is_its_error(tmp_path, reason):
    with rogue(tmp_path, lambda _: JSONResponse(completion(finish_reason=reason or {"a": 1}))) as front:
        assert ask(front).status_code == 502
        assert is_well(front)


def fetching(url: str) -> dict[str, list[dict]]:
    """Requests that name an address, wherever one may stand, by the surface that is asked."""
    image = {"type": "image_url", "image_url": {"url": url}}
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"$ref": url}}}
    chat = [{"messages": [{"role": "user", "content": [image]}]}, {**SURFACES["/v1/chat/completions"]("hi")}]
    chat[1]["response_format"] = schema
    source = {"type": "url", "url": url}
    part = {"type": "input_image", "image_url": url}
    return {
        "/v1/chat/completions": chat,
        "/v1/responses": [{"input": [{"role": "user", "content": [part]}]}, {"input": "hi", "prompt": {"id": url}}],
        "/v1/messages": [
            {"max_tokens": 9, "messages": [{"role": "user", "content": [{"type": "image", "source": source}]}]},
            {"max_tokens": 9, "messages": [{"role": "user", "content": "hi"}], "mcp_servers": [source]},
        ],
        "/v1/embeddings": [{"input": url}, {"input": [url], "encoding_format": url}],
    }


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "2130706433", "[::ffff:127.0.0.1]"])
def test_no_address_in_a_request_is_ever_fetched(tmp_path, host):
    """By any name of it: images, schemas and connectors go to the model's server as they are, or are refused."""
    inside = []

    async def secret(_):
        inside.append(1)
        return JSONResponse({})

    internal = ServerThread(Starlette(routes=[Route("/{path:path}", secret, methods=["POST", "GET"])]))
    url = f"http://{host}:{internal.start().rpartition(':')[2]}/latest/meta-data"
    try:
        with rogue(tmp_path, lambda _: JSONResponse(completion())) as front:
            headers = {"authorization": f"Bearer {front.key('a')}"}
            for model in ("policy", "other"):
                for path, bodies in fetching(url).items():
                    for body in bodies:
                        sent = {"model": model, **body}
                        reply = httpx.post(f"{front.url}{path}", json=sent, headers=headers, timeout=30)
                        assert reply.status_code < 500
    finally:
        internal.stop()
    assert inside == []
