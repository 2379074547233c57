from __future__ import annotations

import asyncio
import logging
import socket
import threading
from types import SimpleNamespace

import httpx
import pytest

from lightning_spans.errors import ConfigError
from lightning_trainer.gateway.app import create_app
from lightning_trainer.gateway.auth.keys import Keys
from lightning_trainer.gateway.http.serving import ServerThread
from lightning_trainer.gateway.upstream.upstream import Upstream, parse_upstream
from support.fakes import FakeEngine, served


async def _app(scope, receive, send):
    if scope["type"] == "lifespan":
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await send({"type": "lifespan.shutdown.complete"})
        return
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"here"})


def test_a_server_answers_when_start_returns_and_not_after_stop():
    others = set(threading.enumerate())  # of tests before, in the same process
    server = ServerThread(_app)
    url = server.start()
    assert url.startswith("http://127.0.0.1:")
    assert httpx.get(url).text == "here"
    server.stop()
    server.stop()
    with pytest.raises(httpx.ConnectError):
        httpx.get(url)
    assert not [thread for thread in set(threading.enumerate()) - others if thread.name == "lightning-server"]


def test_a_port_in_use_is_an_error_that_says_what_to_do():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} .* is in use.*--port"):
            ServerThread(_app, port=port).start()


def test_a_port_just_left_can_be_used_again():
    first = ServerThread(_app)
    port = int(first.start().rpartition(":")[2])
    httpx.get(f"http://127.0.0.1:{port}")
    first.stop()
    with ServerThread(_app, port=port):
        assert httpx.get(f"http://127.0.0.1:{port}").text == "here"


@pytest.mark.parametrize(("host", "port"), [("203.0.113.9", 0), ("no such host", 0), ("127.0.0.1", 700_000)])
def test_an_address_that_can_not_be_listened_on_is_an_error(host, port):
    with pytest.raises(ConfigError, match=r"can't listen on .*--host or --port"):
        ServerThread(_app, host, port, plain=True).start()


def test_an_app_that_fails_to_start_is_an_error_and_frees_the_port():
    async def broken(scope, receive, send):
        await receive()
        await send({"type": "lifespan.startup.failed", "message": "no store"})

    server = ServerThread(broken)
    with pytest.raises(ConfigError, match="did not start"):
        server.start()


def test_starting_changes_no_logging_of_the_program():
    before = [(h, h.level) for h in logging.getLogger().handlers], logging.getLogger("uvicorn").handlers[:]
    with ServerThread(_app):
        pass
    assert ([(h, h.level) for h in logging.getLogger().handlers], logging.getLogger("uvicorn").handlers) == before


def test_two_policies_of_one_name_are_refused(tmp_path):
    with served(tmp_path) as server, pytest.raises(ConfigError, match="same name: policy, policy"):
        create_app(server.store, keys=Keys.fresh(), engine=FakeEngine(), upstreams=[Upstream("policy", "http://x/v1")])


@pytest.mark.parametrize(
    ("text", "upstream"),
    [
        ("m=http://h:8000", Upstream("m", "http://h:8000/v1")),
        ("m=http://h:8000/", Upstream("m", "http://h:8000/v1")),
        ("org/m=https://h/api/v1/", Upstream("org/m", "https://h/api/v1")),
    ],
)
def test_an_upstream_is_read(text, upstream):
    assert parse_upstream(text) == upstream


@pytest.mark.parametrize("text", ["", "m", "m=", "=http://h", "m=h:8000", "m=ftp://h"])
def test_a_malformed_upstream_says_its_form(text):
    with pytest.raises(ConfigError, match="MODEL=URL"):
        parse_upstream(text)


async def test_an_end_that_is_reported_twice_waits_for_the_record_of_the_cut_call_both_times(server):
    gateway = create_app(server.store, keys=Keys.fresh(), engine=FakeEngine()).state.gateway
    begun, recorded, cuts = asyncio.Event(), asyncio.Event(), []

    async def call():
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cuts.append("cut")
            await recorded.wait()

    gateway._open[running := asyncio.ensure_future(call())] = SimpleNamespace(attempt_id="attempt", begun=False)
    await begun.wait()
    ends = [asyncio.ensure_future(gateway._end_calls({"attempt": True})) for _ in range(2)]
    _done, waiting = await asyncio.wait(ends, timeout=0.2)
    assert waiting == set(ends)
    recorded.set()
    await asyncio.gather(running, *ends)
    assert cuts == ["cut"]


async def test_a_call_whose_record_is_being_written_is_not_cut(server):
    """The end of its attempt waits for the record, on which it depends how the attempt counts."""
    gateway = create_app(server.store, keys=Keys.fresh(), engine=FakeEngine()).state.gateway
    begun, written = asyncio.Event(), asyncio.Event()

    async def record():
        begun.set()
        await written.wait()
        return "written"

    gateway._open[running := asyncio.ensure_future(record())] = SimpleNamespace(attempt_id="attempt", begun=True)
    await begun.wait()
    end = asyncio.ensure_future(gateway._end_calls({"attempt": True}))
    _done, waiting = await asyncio.wait([end], timeout=0.2)
    assert waiting == {end}
    written.set()
    await end
    assert running.result() == "written"
