"""Probes: what an upstream or a full disk does must not make anybody start a healthy server again."""

from __future__ import annotations

import httpx
import pytest

from lightning_spans.store import open_store
from lightning_trainer.gateway.upstream.upstream import Upstream
from support.fakes import FakeEngine, served


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr("lightning_trainer.gateway.health._FRESH_S", 0.0)


def probes(url: str) -> tuple[int, int]:
    return tuple(httpx.get(f"{url}/{name}").status_code for name in ("livez", "readyz"))


def ask(front, model: str) -> httpx.Response:
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}]}
    headers = {"authorization": f"Bearer {front.key('a')}"}
    return httpx.post(f"{front.url}/v1/chat/completions", json=body, headers=headers, timeout=30)


def test_an_upstream_that_is_down_makes_the_server_unready_and_leaves_it_alive(tmp_path):
    down = Upstream("far", "http://127.0.0.1:9/v1")
    with served(tmp_path, FakeEngine(model="policy"), upstreams=[down]) as front:
        assert probes(front.url) == (200, 200)
        assert ask(front, "far").status_code == 502
        assert probes(front.url) == (200, 503)
        assert httpx.get(f"{front.url}/readyz").json()["not_ready"] == ["far"]


def test_an_engine_whose_last_call_failed_is_asked_again(tmp_path):
    with served(tmp_path, FakeEngine(model="policy")) as front:
        front.engine.play([RuntimeError("out of memory"), "ok"])
        assert ask(front, "policy").status_code == 500
        assert httpx.get(f"{front.url}/healthz").status_code == 503
        assert probes(front.url) == (200, 200)


def test_a_store_that_can_not_write_makes_the_server_unready(tmp_path):
    class Full:
        def __init__(self, store):
            self._store = store

        def heartbeat(self, *_, **__):
            raise OSError(28, "No space left on device")

        def __getattr__(self, name):
            return getattr(self._store, name)

    with served(tmp_path, store=Full(open_store(str(tmp_path / "s.db")))) as front:
        assert probes(front.url) == (200, 503)
        assert httpx.get(f"{front.url}/readyz").json()["not_ready"] == ["store"]
