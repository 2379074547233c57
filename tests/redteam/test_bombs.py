"""Requests that want to fill the server: refused by what their bytes tell, before anything is made of them."""

from __future__ import annotations

import gzip
import json
import random
import socket

import httpx
import orjson
import pytest
from bombs import CHAT, GZIP, JSON, OTLP, PROTOBUF, USER, _listed, spans_protobuf

from lightning_spans.record.delivery import otlp
from lightning_spans.schema import json as parsed
from lightning_trainer.gateway.auth.quotas import HOUR_S, Quotas
from lightning_trainer.gateway.http import weight
from lightning_trainer.gateway.http.errors import Refusal
from lightning_trainer.gateway.ingest import genai
from lightning_trainer.gateway.ingest import otlp as receiver
from lightning_trainer.gateway.settings import Limits
from support.fakes import FakeEngine, served

MEGABYTE = 1 << 20


@pytest.fixture
def unread(monkeypatch):
    """Parsers that must not be reached: by no byte of a bomb is an object made."""
    reached = []

    def parser(name):
        def parse(*_, **__):
            reached.append(name)
            raise AssertionError(f"{name} was reached")

        return parse

    monkeypatch.setattr(receiver, "read", parser("OTLP"))
    monkeypatch.setattr(parsed.orjson, "loads", parser("JSON"))
    return reached


@pytest.mark.parametrize(
    ("path", "headers", "body"),
    [
        ("/v1/traces", PROTOBUF, spans_protobuf(size=8 * MEGABYTE)),
        ("/v1/traces", PROTOBUF, spans_protobuf(b"\x12\x02\x4a\x00", 8 * MEGABYTE)),
        ("/v1/traces", {**PROTOBUF, **GZIP}, gzip.compress(spans_protobuf(size=32 * MEGABYTE))),
        ("/v1/traces", JSON, _listed(OTLP, b"{}", b"]}]}]}", 4 * MEGABYTE)),
        ("/v1/traces", {**JSON, **GZIP}, gzip.compress(_listed(OTLP, b"{}", b"]}]}]}", 4 * MEGABYTE))),
        ("/v1/chat/completions", JSON, _listed(CHAT, USER, b"]}", 4 * MEGABYTE)),
        ("/v1/chat/completions", {**JSON, **GZIP}, gzip.compress(_listed(CHAT, USER, b"]}", 31 * MEGABYTE))),
        ("/v1/messages", JSON, _listed(CHAT, b"[]", b"]}", 4 * MEGABYTE)),
        ("/v1/completions", JSON, _listed(b'{"prompt":[', b"1", b"]}", 12 * MEGABYTE)),
        ("/v1/embeddings", JSON, _listed(b'{"input":[', b'"a"', b"]}", 24 * MEGABYTE)),
        ("/api/rollouts", JSON, _listed(b'{"rollouts":[', b"{}", b"]}", 4 * MEGABYTE)),
        ("/api/query", JSON, _listed(b'{"what":"spans","trace_ids":[', b'"a"', b"]}", 24 * MEGABYTE)),
    ],
)
def test_what_would_fill_the_memory_is_refused_before_it_is_parsed(server, unread, path, headers, body):
    key = server.keys.issue("admin") if path.startswith("/api/") else server.key("bomber")
    reply = httpx.post(
        f"{server.url}{path}", content=body, headers={**headers, "authorization": f"Bearer {key}"}, timeout=60
    )
    assert (reply.status_code, unread) == (413, [])
    assert httpx.get(f"{server.url}/healthz").status_code == 200


def test_more_spans_than_a_request_may_have_are_refused_whole(tmp_path):
    with served(tmp_path, FakeEngine(), limits=Limits(request_spans=3)) as server:
        headers = {**PROTOBUF, "authorization": f"Bearer {server.key('a')}"}
        for count, status in ((3, 400), (4, 413)):  # broken ones count, too
            body = otlp._block(b"\x0a", otlp._block(b"\x12", b"\x12\x00" * count))
            assert httpx.post(f"{server.url}/v1/traces", content=body, headers=headers).status_code == status


def test_json_in_an_attribute_that_would_fill_the_memory_stays_text():
    text = "[" + "[]," * (4 * MEGABYTE) + "[]]"
    assert genai.parse_if_json(text) is text
    assert genai.parse_if_json("[[],[]]") == [[], []]


@pytest.mark.parametrize("path", ["/api/query", "/api/rollouts", "/api/claims", "/api/rewards", "/v1/chat/completions"])
@pytest.mark.parametrize("whose", [None, "nonsense", "live"])
def test_a_key_is_looked_at_before_the_body_comes(server, path, whose):
    """The body never ends; the answer is there before it."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    key = server.keys.issue("live") if whose == "live" else whose
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 33000000\r\n"
    head += (f"Authorization: Bearer {key}\r\n" if key else "") + '\r\n{"a":'
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(head.encode())
        answer = connection.recv(4096)
    assert answer.startswith(b"HTTP/1.1 403" if whose == "live" else b"HTTP/1.1 401")


def test_every_route_of_the_api_needs_a_key_before_its_body(server):
    """Also one that names no key, such as a trainer's own: it needs an admin's."""

    async def extra(body: dict) -> dict:
        return body

    extra.__annotations__ = {"body": dict, "return": dict}
    server.app.add_api_route("/api/extra", extra, methods=["POST"])
    server.app.openapi_schema = None
    paths = server.app.openapi()["paths"]
    posts = [path.replace("{attempt_id}", "a") for path, methods in paths.items() if "post" in methods]
    assert len(posts) > 10
    host, _, port = server.url.removeprefix("http://").partition(":")
    for path in posts:
        for key, status in ((None, b"401"), (server.keys.issue("live"), b"403")):
            head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 33000000\r\n"
            head += (f"Authorization: Bearer {key}\r\n" if key else "") + "\r\n"
            with socket.create_connection((host, int(port)), timeout=20) as connection:
                connection.sendall(head.encode())
                assert connection.recv(4096)[9:12] == status, path
    sent = httpx.post(
        f"{server.url}/api/extra", json={"a": 1}, headers={"authorization": f"Bearer {server.keys.issue('admin')}"}
    )
    assert sent.json() == {"a": 1}


def test_unfinished_bodies_of_one_key_hold_a_bounded_part_of_the_memory(tmp_path):
    with served(tmp_path, FakeEngine(), limits=Limits(held_bytes=400_000)) as server:
        host, _, port = server.url.removeprefix("http://").partition(":")
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 90000\r\n"
        head += f"Authorization: Bearer {server.key('a')}\r\n\r\n"
        first = socket.create_connection((host, int(port)), timeout=20)
        first.sendall(head.encode() + b" " * 60_000)
        while server.app.state.intake._held < 60_000:
            httpx.get(f"{server.url}/healthz")
        with socket.create_connection((host, int(port)), timeout=20) as second:
            second.sendall(head.encode() + b" " * 60_000)
            assert second.recv(4096).startswith(b"HTTP/1.1 429")
        body = CHAT + USER + b"]}"
        other = {"authorization": f"Bearer {server.key('other')}", **JSON}
        assert httpx.post(f"{server.url}/v1/chat/completions", content=body, headers=other).status_code == 200
        first.close()
        while server.app.state.intake._held:
            httpx.get(f"{server.url}/healthz")
        own = {"authorization": f"Bearer {server.key('a')}", **JSON}
        assert httpx.post(f"{server.url}/v1/chat/completions", content=body, headers=own).status_code == 200


def test_an_attempt_that_has_brought_all_it_may_is_told_so(tmp_path):
    limits = Limits(attempt_calls=2, attempt_spans=2, attempt_bytes=100_000)
    span = {"traceId": "a" * 32, "startTimeUnixNano": "1", "endTimeUnixNano": "2", "name": "n"}

    def spans(*numbers):
        listed = [{**span, "spanId": f"{number:016x}"} for number in numbers]
        return json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": listed}]}]})

    with served(tmp_path, FakeEngine(), limits=limits) as server, httpx.Client(base_url=server.url) as client:
        client.headers = {"authorization": f"Bearer {server.key('a')}", **JSON}
        chats = [client.post("/v1/chat/completions", content=CHAT + USER + b"]}") for _ in range(3)]
        assert [reply.status_code for reply in chats] == [200, 200, 429]
        assert "2 model calls" in chats[2].json()["error"]["message"]
        assert "attempt_calls" in chats[2].json()["error"]["message"]
        sent = [
            client.post("/v1/traces", content=spans(*numbers)).status_code for numbers in ((1,), (2, 3), (4,), (5,))
        ]
        assert sent == [200, 429, 200, 429]
        assert client.post("/v1/traces", content=b" " * 99_999).status_code == 429
        client.headers["authorization"] = f"Bearer {server.key('other')}"
        assert client.post("/v1/chat/completions", content=CHAT + USER + b"]}").status_code == 200
        assert len(server.calls("a")) == 2
        assert len(server.store.spans(attempt_ids=["a"])) == 2


def test_a_live_key_may_go_on_after_its_hour():
    from lightning_trainer.gateway.auth.keys import Keys

    now = 0.0
    quotas = Quotas(Limits(live_spans=10), clock=lambda: now)
    keys = Keys.fresh()
    one, other = (keys.check(keys.issue("live")) for _ in range(2))
    quotas.take(one, "spans", 10)
    now = HOUR_S - 100
    with pytest.raises(Refusal) as refused:
        quotas.take(one, "spans")
    assert (refused.value.status, refused.value.headers) == (429, {"retry-after": "100"})
    quotas.take(other, "spans", 10)
    now = HOUR_S
    quotas.take(one, "spans", 10)
    quotas.take(keys.check(keys.issue("admin")), "spans", 10**9)


def _count(data) -> int:
    inner = data.values() if isinstance(data, dict) else data if isinstance(data, list) else None
    return 0 if inner is None else 1 + sum(map(_count, inner))


def _depth(data) -> int:
    inner = data.values() if isinstance(data, dict) else data if isinstance(data, list) else None
    return 0 if inner is None else 1 + max(map(_depth, inner), default=0)


@pytest.mark.parametrize("seed", range(5))
def test_brackets_in_texts_are_no_objects(monkeypatch, seed):
    """Whatever stands in texts, escaped or not, and wherever a window of bytes is cut."""
    monkeypatch.setattr(weight, "_WINDOW", 7)
    rng = random.Random(seed)

    def made(levels: int):
        kind = rng.random()
        if levels == 0 or kind < 0.4:
            return rng.choice(['a{"[', "\\", '\\"', '\\\\"{', "x,y[", '"', 1, None])
        if kind < 0.7:
            return [made(levels - 1) for _ in range(rng.randint(0, 3))]
        return {rng.choice(["k", "{", '"[', "\\"]): made(levels - 1) for _ in range(rng.randint(0, 3))}

    for _ in range(500):
        data = made(5)
        body, count, depth = orjson.dumps(data), _count(data), _depth(data)
        monkeypatch.setattr(weight, "_PASSES", rng.randint(0, max(depth - 1, 0) // 2))
        assert not weight.has_more_containers(body, count)
        assert weight.has_more_containers(body, count - 1)
        assert not weight.deeper_than(body, data, depth)
        assert depth == 0 or weight.deeper_than(body, data, depth - 1)


def test_texts_that_close_brackets_hide_no_depth():
    body = b'["]",' * 101 + b"1" + b',"["]' * 101
    assert weight.deeper_than(body, orjson.loads(body), 100)
    assert not weight.deeper_than(body, orjson.loads(body), 101)


def test_a_long_text_full_of_brackets_is_taken(server):
    body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": '{"a":[1,2]},' * 100_000}]})
    headers = {"authorization": f"Bearer {server.key('coder')}", **JSON}
    server.engine.max_model_len = 10_000_000
    try:
        reply = httpx.post(f"{server.url}/v1/chat/completions", content=body, headers=headers, timeout=60)
    finally:
        server.engine.max_model_len = 100_000
    assert reply.status_code == 200


def test_more_text_than_a_context_can_hold_is_refused_before_it_is_rendered(server, monkeypatch):
    from lightning_trainer.gateway.prompt.template import ChatFormat

    rendered = []
    monkeypatch.setattr(ChatFormat, "render", lambda *_: rendered.append(1))
    body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "a" * 3_300_000}]})
    headers = {"authorization": f"Bearer {server.key('long')}", **JSON}
    reply = httpx.post(f"{server.url}/v1/chat/completions", content=body, headers=headers, timeout=60)
    assert (reply.status_code, reply.json()["error"]["code"], rendered) == (400, "context_length_exceeded", [])
