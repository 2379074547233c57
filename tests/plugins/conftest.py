"""What plugins' tests share: a run of a program attached."""

from __future__ import annotations

import asyncio
from contextlib import closing

import pytest

from lightning_conformance.plugins.program import record, user_environment
from lightning_conformance.plugins.server import ScriptedServer
from lightning_spans import attach, hooks, open_store
from support.listening import Listener


@pytest.fixture
def found_of(request, tmp_path):
    """Return a function that runs a program attached to the framework that the module tests.

    It gives what the program left, after what every program must keep.
    """

    def work(program):
        found = record(program, tmp_path, framework=request.module.TestConformance.framework, tracer="embedded")
        known = {span.span_id for span in found.spans}
        assert all(span.parent_id is None or span.parent_id in known for span in found.spans)
        return found

    return work


@pytest.fixture
def seen(request, tmp_path, monkeypatch):
    """Listen to the spans of a test that runs attached to the framework of its module."""
    monkeypatch.setenv("LIGHTNING_SPOOL", str(tmp_path / "spool"))
    listener = Listener()
    hooks.register(listener, "listener")
    with attach(request.module.TestConformance.framework, store=str(tmp_path / "traces.db")):
        yield listener
    hooks.unregister("listener")


@pytest.fixture
def operations_until_stopped(request, tmp_path):
    """Return a function that runs a program of a URL and a tool that detaches; it gives the operations of the spans."""

    def work(program):
        store = str(tmp_path / "traces.db")
        with user_environment(tmp_path), ScriptedServer() as server:
            attachment = attach(request.module.TestConformance.framework, store=store)

            def stop() -> str:
                """Stop."""
                attachment.detach()
                return "stopped"

            program(server.url, stop)
            assert len(server.requests) == 2
            assert "stopped" in str(server.requests[-1].body), "the program went on with what the tool returned"
            assert "traceparent" not in server.requests[-1].headers
        with closing(open_store(store)) as recorded:
            return sorted(span.operation for span in recorded.spans())

    return work


@pytest.fixture
def under_way():
    """Return a coroutine function that waits until a model call is made."""
    unfinished = pytest.importorskip("lightning_openai.reading.unfinished").unfinished

    async def wait():
        while not unfinished:
            await asyncio.sleep(0.01)

    return wait


@pytest.fixture(params=["httpx", "httpx2"])
def library(request):
    return pytest.importorskip(request.param)
