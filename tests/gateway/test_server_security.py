"""Encryption, names, and connections that are waited for with a bound."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
import subprocess
import threading
import time

import httpx
import openai
import pytest

import lightning_openai
from lightning_spans import Attempt, use_attempt
from lightning_spans.errors import ConfigError
from lightning_spans.store.http import HttpStore
from lightning_spans.store.traces import traces_of
from lightning_trainer.gateway.auth.keys import Keys
from lightning_trainer.gateway.http.guard import Guard
from lightning_trainer.gateway.http.serving import ServerThread, Tls
from lightning_trainer.gateway.http.timeouts import BoundedProtocol
from lightning_trainer.gateway.settings import Limits, parse_limits
from support.fakes import FakeEngine, served


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with served(tmp_path_factory.mktemp("security"), FakeEngine()) as running:
        yield running


@pytest.fixture(scope="module")
def tls(tmp_path_factory):
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    folder = tmp_path_factory.mktemp("tls")
    certificate, key = folder / "cert.pem", folder / "key.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-days",
        "2",
        "-nodes",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
    ]
    command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run([*command, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True)
    return Tls(certificate, key)


@pytest.mark.parametrize("host", ["0.0.0.0", "", "::", "192.0.2.1"])
def test_other_machines_are_not_served_without_encryption_by_accident(host):
    with pytest.raises(ConfigError, match=r"--tls-cert(.|\n)*--plain-http"):
        ServerThread(lambda *_: None, host)


def test_calls_spans_and_claims_go_through_tls(tls, server, monkeypatch):
    thread = ServerThread(server.app, tls=tls)
    url = thread.start()
    try:
        assert url.startswith("https://")
        trusting = ssl.create_default_context(cafile=str(tls.certificate))
        with httpx.Client(verify=trusting, headers={"authorization": f"Bearer {server.key('a')}"}) as client:
            body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
            assert client.post(f"{url}/v1/chat/completions", json=body).status_code == 200
        with pytest.raises(httpx.ConnectError):  # who does not know the certificate sends no key
            httpx.get(f"{url}/healthz")
        monkeypatch.setenv("SSL_CERT_FILE", str(tls.certificate))
        runner = HttpStore(url, key=server.keys.issue("runner"))
        assert runner.claim("w") == []
        runner.close()
        attempt = Attempt("rollout of t", "t", endpoint=url, key=server.key("t"), agents=("writer",))
        with lightning_openai.attach() as attached, use_attempt(attempt), lightning_openai.agent("writer"):
            messages = [{"role": "user", "content": "hi"}]
            openai.OpenAI(api_key="mine").chat.completions.create(model="m", messages=messages)
            assert attached.flush(30)
        (trace,) = traces_of(server.store, attempt_ids=["t"])
        assert [node.span.agent for node in trace.chats] == ["writer"]
        assert trace.unjoined == ()
        with pytest.raises(httpx.RemoteProtocolError):  # nothing is served unencrypted beside it
            httpx.get(url.replace("https", "http") + "/healthz")
        old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
        with pytest.warns(DeprecationWarning, match="TLS"):
            old.maximum_version = ssl.TLSVersion.TLSv1_1
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/healthz", verify=old)
    finally:
        thread.stop()


def test_a_certificate_that_does_not_fit_is_told_before_listening(tls, tmp_path):
    with pytest.raises(ConfigError, match="certificate"):
        ServerThread(lambda *_: None, tls=Tls(tls.certificate, tmp_path / "missing.pem")).start()
    other = tmp_path / "other.pem"
    other.write_text("nothing")
    with pytest.raises(ConfigError, match=r"other\.pem"):
        ServerThread(lambda *_: None, tls=Tls(other, tls.key)).start()


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:80", "LOCALHOST:9", "[::1]:80"])
def test_a_server_on_loopback_answers_under_its_own_names(server, host):
    assert httpx.get(f"{server.url}/healthz", headers={"host": host}).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.", "[::2]"])
def test_and_under_no_other(server, host):
    assert httpx.get(f"{server.url}/healthz", headers={"host": host}).status_code == 421


def connect(url: str) -> socket.socket:
    host, _, port = url.removeprefix("http://").partition(":")
    return socket.create_connection((host, int(port)), timeout=60)


def is_closed(connection: socket.socket, within_s: float = 5.0) -> bool:
    connection.settimeout(within_s)
    try:
        while connection.recv(65536):
            pass
    except TimeoutError:
        return False
    except ConnectionError:
        return True
    return True


@pytest.fixture
def hasty(monkeypatch):
    monkeypatch.setattr(BoundedProtocol, "head_s", 0.3)
    monkeypatch.setattr(BoundedProtocol, "unread_s", 0.5)


@pytest.mark.parametrize(
    "sent", [b"", b"GET /heal", b"GET / HTTP/1.1\r\n", b"GET / HTTP/1.1\r\nHost: localhost\r\nX: "]
)
def test_a_head_that_does_not_come_is_not_waited_for(server, hasty, sent):
    with connect(server.url) as connection:
        connection.sendall(sent)
        assert is_closed(connection)


def test_nor_one_that_drips_after_an_answer(server, hasty):
    with connect(server.url) as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        time.sleep(0.3)
        connection.sendall(b"G")
        assert is_closed(connection)


def test_a_head_without_end_is_cut(server):
    with connect(server.url) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n")
        try:
            for number in range(20_000):
                connection.sendall(b"X-%d: " % number + b"a" * 100 + b"\r\n")
        except ConnectionError:
            return
        assert is_closed(connection)


def test_a_body_that_does_not_come_is_a_408(server):
    with ServerThread(Guard(server.app, body_s=0.3)) as thread:
        url = f"http://127.0.0.1:{thread._server.servers[0].sockets[0].getsockname()[1]}"
        for path in ("/v1/chat/completions", "/v1/traces", "/api/query"):
            with connect(url) as connection:
                head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n"
                head += f"Content-Type: application/json\r\nAuthorization: Bearer {server.keys.issue('admin')}\r\n\r\n"
                connection.sendall(head.encode() + b"{")
                assert connection.recv(65536).startswith(b"HTTP/1.1 408")


def test_a_client_that_does_not_read_is_not_waited_for_for_ever(hasty):
    left = threading.Event()

    async def endless(scope, receive, send):
        if scope["type"] == "lifespan":
            while (message := await receive())["type"] != "lifespan.shutdown":
                await send({"type": f"{message['type']}.complete"})
            await send({"type": "lifespan.shutdown.complete"})
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        gone = asyncio.ensure_future(_disconnected(receive))
        while not gone.done():
            await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
            await asyncio.sleep(0)
        left.set()

    thread = ServerThread(endless)
    try:
        with connect(thread.start()) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert left.wait(60)
    finally:
        thread.stop()


async def _disconnected(receive):
    while (await receive())["type"] != "http.disconnect":
        pass


def test_keys_of_the_secret_before_stay_good_for_one_rotation(tmp_path):
    path = tmp_path / "secret"
    first = Keys.from_file(path).issue("admin")
    second = Keys.from_file(path, rotate=True).issue("admin")
    assert Keys.from_file(path).check(first).scope == "admin"
    rotated = Keys.from_file(path, rotate=True)
    assert rotated.check(second).scope == "admin"
    with pytest.raises(Exception, match="not one of this server's"):
        rotated.check(first)
    assert path.stat().st_mode & 0o777 == 0o600


def test_limits_are_set_by_name():
    assert parse_limits([]) == Limits()
    assert parse_limits(["attempt_calls=5", "late_spans_s=1.5"]) == Limits(attempt_calls=5, late_spans_s=1.5)
    for wrong in ("calls=5", "attempt_calls", "attempt_calls=many", "attempt_calls=0"):
        with pytest.raises(ConfigError, match="--limit"):
            parse_limits([wrong])
