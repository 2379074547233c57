"""Attacks with the connection: what is sent behind a request, beside its answer, and after a refusal."""

from __future__ import annotations

import http.client
import resource
import socket

import pytest

from lightning_trainer.gateway.http.timeouts import PIPELINED
from support.fakes import FakeEngine, served

CHAT = b'{"model":"policy","messages":[{"role":"user","content":"hi"}]}'
MANY = 4000  # lines of 1 KB: far more than a head may have, and than what the kernel holds between the two


@pytest.fixture(scope="module")
def slow(tmp_path_factory):
    """A server whose answers take until the test has done what it does."""
    with served(tmp_path_factory.mktemp("slow"), FakeEngine(lambda _: "ok", delay_s=60)) as running:
        yield running


def connect(url: str) -> socket.socket:
    host, _, port = url.removeprefix("http://").partition(":")
    return socket.create_connection((host, int(port)), timeout=20)


def head(key: str, framing: str, path: str = "/v1/chat/completions") -> bytes:
    lines = ["Host: localhost", f"Authorization: Bearer {key}", "Content-Type: application/json", framing]
    return "\r\n".join([f"POST {path} HTTP/1.1", *lines, "", ""]).encode()


def is_cut(connection: socket.socket, line: bytes) -> bool:
    """Send a line again and again; whether the server closes the connection."""
    try:
        for _ in range(MANY):
            connection.sendall(line)
        return not connection.recv(1)
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def test_trailers_without_end_are_cut(server):
    with connect(server.url) as connection:
        chunks = b"%x\r\n%b\r\n0\r\n" % (len(CHAT), CHAT)
        connection.sendall(head(server.key("trailers"), "Transfer-Encoding: chunked") + chunks)
        assert is_cut(connection, b"x-a: " + b"y" * 1000 + b"\r\n")


def test_a_head_without_end_behind_a_call_under_way_is_cut(slow):
    with connect(slow.url) as connection:
        connection.sendall(head(slow.key("behind"), f"Content-Length: {len(CHAT)}") + CHAT)
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n")
        assert is_cut(connection, b"x-a: " + b"y" * 1000 + b"\r\n")


def test_thousands_of_requests_at_once_on_a_connection_are_cut_not_kept(slow):
    with connect(slow.url) as connection:
        connection.sendall(head(slow.key("pipelined"), f"Content-Length: {len(CHAT)}") + CHAT)
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2 * PIPELINED)
        assert not connection.recv(1)  # and no 400 where the first call's answer would stand


def test_requests_that_do_not_wait_for_each_other_are_answered_in_order(server):
    with connect(server.url) as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n" * (PIPELINED - 1))
        connection.sendall(b"GET /nowhere HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        found = b""
        while part := connection.recv(65536):
            found += part
    assert [part[:3] for part in found.split(b"HTTP/1.1 ")[1:]] == [*[b"200"] * (PIPELINED - 1), b"404"]


def test_the_description_that_needs_no_key_is_written_once(server, ask, monkeypatch):
    """Written anew for each request it held up everybody else."""
    written = []
    monkeypatch.setattr(server.app, "openapi", lambda real=server.app.openapi: written.append(1) or real())
    first, again = ask("GET", "/openapi.json"), ask("GET", "/openapi.json")
    assert first.json() == again.json() == server.app.openapi_schema
    assert sum(written) == 1


@pytest.mark.parametrize("path", ["/v1/traces", "/v1/chat/completions", "/api/spans"])
def test_a_refused_sender_of_much_gets_to_read_why(server, path):
    """Clients that write the whole body before they read: http.client, and what stands on it."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=30)
    connection.request("POST", path, b"{" + b" " * 20_000_000, {"authorization": "Bearer wrong"})
    assert connection.getresponse().status == 401
    connection.close()


def test_thousands_of_idle_connections_keep_nobody_from_an_answer(server, ask):
    """Both ends are in this process, so that it has two files for each."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    idle = [socket.socket() for _ in range(min(5000, most // 2 - 100))]
    try:
        for each in idle:
            each.setblocking(False)
            each.connect_ex((host, int(port)))
        assert [ask("GET", "/livez").status_code for _ in range(3)] == [200] * 3
    finally:
        for each in idle:
            each.close()
    assert ask("GET", "/livez").status_code == 200
