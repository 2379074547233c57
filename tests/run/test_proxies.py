"""A company's proxy never stands between us and this machine; where one stands before a server, the error names it."""

from __future__ import annotations

import os
from urllib.request import getproxies, proxy_bypass

import httpx
import pytest

from lightning_conformance import ScriptedServer
from lightning_trainer.proxies import bypass_for_loopback, through_proxy

GONE = "http://user:secret@127.0.0.1:9"
PROXIES = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "ALL_PROXY", "all_proxy"), GONE)


@pytest.fixture(autouse=True)
def _proxied(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in PROXIES.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.setenv("no_proxy", "intern.example")


def test_this_machine_is_reached_without_a_proxy_and_others_as_they_were() -> None:
    bypass_for_loopback(os.environ)
    bypass_for_loopback(os.environ)
    assert os.environ["no_proxy"] == os.environ["NO_PROXY"] == "intern.example,localhost,127.0.0.1,::1"
    assert all(proxy_bypass(host) for host in ("127.0.0.1", "localhost", "intern.example"))
    assert getproxies()["https"] == GONE
    assert not proxy_bypass("api.example")
    with ScriptedServer() as server:
        httpx.get(f"{server.url}/models")


def test_an_error_names_the_proxy_and_not_its_password() -> None:
    bypass_for_loopback(os.environ)
    assert through_proxy("http://127.0.0.1:8000/v1") == ""
    told = through_proxy("http://api.example/v1")
    assert "127.0.0.1:9" in told
    assert "secret" not in told
