"""Attacks with the request itself: its head, its size, its nesting, its encoding, its path."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import zlib

import pytest
from flood import flood

from lightning_trainer.gateway.app import create_app
from lightning_trainer.gateway.auth.keys import Keys
from lightning_trainer.gateway.http.serving import ServerThread
from lightning_trainer.gateway.settings import Limits
from support.gateway.surfaces import SURFACES

JSON_PATHS = [*SURFACES, "/v1/embeddings", "/api/query", "/api/rewards", "/api/rollouts", "/api/spans"]
MALFORMED = [
    b"", b"{", b"null", b"[]", b'"text"', b"\xff\xfe", b'{"a": NaN}', b"{}" * 2, b'{"messages": 3}', b'{"model": []}',
    b'{"model": "policy", "messages": [[[]]]}', b'{"model": "policy", "input": {"a": 1}}',
    b'{"model": "policy", "prompt": [[1, -1]]}', b'{"model": "policy", "messages": [{"role": "user", "content": 3}]}',
    b'{"model": "policy", "max_tokens": 1e400, "messages": []}', b'{"model": "\\ud800", "messages": [{}]}',
]  # fmt: skip


def raw(url: str, data: bytes) -> bytes:
    """Send bytes as they are; give what comes back until the connection is closed or still."""
    host, _, port = url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(data)
        connection.settimeout(1.0)
        found = b""
        try:
            while part := connection.recv(65536):
                found += part
        except TimeoutError:
            pass
        return found


def statuses(answer: bytes) -> list[int]:
    return [int(line.split()[1]) for line in answer.split(b"\r\n") if line.startswith(b"HTTP/1.1 ")]


@pytest.mark.parametrize("path", JSON_PATHS)
def test_malformed_bodies_are_refused_and_break_nothing(ask, server, path):
    for body in MALFORMED:
        headers = {"content-type": "application/json"}
        reply = ask("POST", path, server.keys.issue("admin"), content=body, headers=headers)
        assert 400 <= reply.status_code < 500, (body, reply.text)
        assert "error" in reply.json()
    assert ask("GET", "/healthz").status_code == 200


@pytest.mark.parametrize("path", [*JSON_PATHS, "/v1/traces"])
@pytest.mark.parametrize("levels", [500, 200_000])
def test_deep_nesting_overflows_no_stack(ask, server, path, levels):
    for opening, closing in ((b"[", b"]"), (b'{"a":', b"}")):
        nested = opening * levels + b"1" + closing * levels
        body = b'{"model": "policy", "what": "spans", "resourceSpans": ' + nested + b', "messages": ' + nested + b"}"
        headers = {"content-type": "application/json"}
        reply = ask("POST", path, server.keys.issue("admin"), content=body, headers=headers)
        assert 400 <= reply.status_code < 500, reply.text[:200]


@pytest.fixture(scope="module")
def small(server):
    """The same store behind a server that takes bodies of 10 KB."""
    keys = Keys.fresh()
    thread = ServerThread(create_app(server.store, keys=keys, engine=server.engine, limits=Limits(body_bytes=10_000)))
    yield thread.start(), keys
    thread.stop()


@pytest.mark.parametrize("path", [*JSON_PATHS, "/v1/traces"])
def test_oversized_bodies_are_refused_declared_or_not(small, path):
    url, keys = small
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Authorization: Bearer {keys.issue('admin')}\r\nConnection: close\r\n"
    assert statuses(raw(url, f"{head}Content-Length: 999999999999\r\n\r\n".encode()))[:1] == [413]
    chunk = b"4000\r\n" + b"a" * 0x4000 + b"\r\n"
    assert statuses(raw(url, f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + chunk + b"0\r\n\r\n"))[:1] == [413]


@pytest.mark.parametrize("path", [*SURFACES, "/v1/traces"])
def test_decompression_bombs_are_not_unpacked(small, path):
    import httpx

    url, keys = small
    bomb = gzip.compress(b" " * 5_000_000)
    twice = gzip.compress(bomb)
    headers = {"content-type": "application/json", "authorization": f"Bearer {keys.issue('admin')}"}
    assert len(bomb) < 10_000  # so that it is the unpacked size that is refused
    encodings = ("gzip, gzip", "br", "zstd", "deflate", "x-gzip", "identity, gzip", "gzip;q=1")
    others = [(twice, encoding, 415) for encoding in encodings]
    for body, encoding, status in ((bomb, "gzip", 413), *others):
        reply = httpx.post(f"{url}{path}", content=body, headers={**headers, "content-encoding": encoding})
        assert reply.status_code == status
    smuggled = gzip.compress(b"{}") + gzip.compress(b"{}")
    for body in (zlib.compress(b"{}"), b"\x1f\x8b", gzip.compress(b"{}")[:-3], smuggled):
        reply = httpx.post(f"{url}{path}", content=body, headers={**headers, "content-encoding": "gzip"})
        assert reply.status_code == 400


@pytest.mark.parametrize("path", SURFACES)
def test_one_request_can_not_be_smuggled_behind_another(ask, server, path):
    inner = (
        f"GET /api/rewards HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {server.keys.issue('admin')}\r\n\r\n"
    )
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {server.key('a')}\r\n"
    attacks = [
        "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
        "Content-Length: 2\r\nContent-Length: 0\r\n\r\n{}",
        "Content-Length: +2\r\n\r\n{}",
        "Content-Length: 0x2\r\n\r\n{}",
        "Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
        "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n",
        "Content-Length : 2\r\n\r\n{}",
        "Transfer-Encoding\x0b: chunked\r\n\r\n0\r\n\r\n",
    ]
    for attack in attacks:
        found = statuses(raw(server.url, f"{head}{attack}{inner}".encode()))
        assert not any(status < 400 for status in found), (attack, found)


@pytest.mark.parametrize(
    "header",
    [
        "authorization",
        "x-api-key",
        "host",
        "traceparent",
        "x-lightning-traceparent",
        "x-lightning-agent",
        "content-type",
    ],
)
def test_headers_that_are_there_twice_are_refused(server, header):
    twice = f"{header}: one\r\n{header}: two\r\n"
    host = "" if header == "host" else "host: localhost\r\n"
    answer = raw(server.url, f"GET /v1/models HTTP/1.1\r\n{host}{twice}\r\n".encode())
    assert statuses(answer) in ([400], [421])


def test_line_breaks_in_header_values_make_no_headers(ask, server):
    agent = "writer%0d%0aauthorization: Bearer x%0d%0a"
    body = SURFACES["/v1/chat/completions"]("hi")
    reply = ask("POST", "/v1/chat/completions", server.key("crlf"), json=body, headers={"x-lightning-agent": agent})
    assert reply.is_success
    assert not any("\n" in value for value in reply.headers.values())
    (call,) = server.calls("crlf")
    assert call.agent == "writer\r\nauthorization: Bearer x\r\n"  # kept as it is, as a name that nobody trains
    for name in (
        b"x-lightning-agent: a\nb: c\r\n",
        b"x-lightning-agent: a\rb\r\n",
        b" folded: x\r\n",
        b"nul: \x00\r\n",
    ):
        head = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n"
        assert not any(status < 400 for status in statuses(raw(server.url, head + name + b"\r\n")))


@pytest.mark.parametrize(
    "path",
    [
        *[
            "/../etc/passwd",
            "/v1/../api/rewards",
            "/v1/models/../../etc/passwd",
            "/%2e%2e/%2e%2e/etc/passwd",
            "//api/rewards",
        ],
        *["/api/attempts/..%2f..%2fetc%2fpasswd/finish", "/v1/models/%00", "/v1/chat/completions/", "/API/rewards"],
        *["/docs/../api/rewards", "/api/rewards;a=b", "/static/../secret", "/v1/chat%2fcompletions", "/\\..\\secret"],
    ],
)
def test_tricks_with_paths_reach_nothing_without_a_key(server, path):
    for method in ("GET", "POST"):
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        found = raw(server.url, head.encode())
        assert all(status >= 300 for status in statuses(found))
        assert b"root:" not in found


def test_a_web_page_can_neither_ask_nor_read(ask, server):
    """No cookie, no CORS: a page that makes a browser send requests has no key, and is let read nothing."""
    for path in [*SURFACES, "/api/rewards", "/healthz"]:
        reply = ask(
            "OPTIONS", path, headers={"origin": "https://evil.example", "access-control-request-method": "POST"}
        )
        assert not reply.is_success
        simple = ask(
            "POST", path, content=b"{}", headers={"origin": "https://evil.example", "content-type": "text/plain"}
        )
        assert simple.status_code in {401, 404, 405}
        assert not any(name.startswith("access-control") for name in [*reply.headers, *simple.headers])
        assert "set-cookie" not in simple.headers
    page = ask("GET", "/healthz", headers={"host": "rebound.example"})
    assert page.status_code == 421


def test_floods_of_broken_requests_leave_the_server_well(ask, server):
    for number in range(300):
        raw_head = [b"\x16\x03\x01", b"GET", b"POST / HTTP/9.9\r\n\r\n", b"\r\n" * 50, b"PRI * HTTP/2.0\r\n\r\n"][
            number % 5
        ]
        host, _, port = server.url.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            connection.sendall(raw_head)
    assert ask("GET", "/healthz").status_code == 200
    body = json.dumps(SURFACES["/v1/chat/completions"]("hi"))
    assert ask("POST", "/v1/chat/completions", server.key("after"), content=body).is_success


@pytest.mark.parametrize("seed", range(3))
def test_values_of_the_wrong_type_anywhere_are_refused_in_the_surfaces_own_shape(server, seed):
    """Never a 500, a lost connection, or a stream without an end."""
    statuses, wrong = asyncio.run(flood(server.url, server.keys.issue("admin"), requests=320, seed=seed))
    assert wrong == []
    assert sum(statuses.values()) == 320


def test_errors_before_a_surface_is_reached_have_its_shape_too(ask, server):
    """A wrong method, a key that is not there, a host that is not ours, a header that is there twice."""
    assert ask("GET", "/v1/messages", server.keys.issue("admin")).json()["type"] == "error"
    assert ask("POST", "/v1/messages").json()["error"]["type"] == "authentication_error"
    head = "POST /v1/messages HTTP/1.1\r\nconnection: close\r\n"
    for lines in ("host: evil\r\n", "host: localhost\r\nx-api-key: a\r\nx-api-key: b\r\n"):
        assert b'{"type":"error"' in raw(server.url, f"{head}{lines}\r\n".encode())
