"""Model calls that pass by every client that is followed: counted, told at detach and by `lightning-rl agents`."""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import subprocess
import sys
import urllib.request

import pytest

pytest.importorskip("openai")

import openai

import lightning_openai
from lightning_conformance.plugins.server import ScriptedServer
from lightning_spans.record.unrecorded import is_model_call

BODY = {"model": "far", "messages": [{"role": "user", "content": "hello"}]}


def by_httpx(url):
    importlib.import_module("httpx").post(url, json=BODY)


def by_httpx2(url):
    async def post():
        async with importlib.import_module("httpx2").AsyncClient() as client:
            await client.post(url, json=BODY)

    asyncio.run(post())


def by_requests(url):
    importlib.import_module("requests").post(url, json=BODY, timeout=60).raise_for_status()


def by_aiohttp(url):
    async def post():
        async with importlib.import_module("aiohttp").ClientSession() as client, client.post(url, json=BODY) as answer:
            answer.raise_for_status()
            await answer.read()

    asyncio.run(post())


def by_urllib(url):
    request = urllib.request.Request(url, json.dumps(BODY).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        answer.read()


WAYS = {"httpx": by_httpx, "httpx2": by_httpx2, "requests": by_requests, "aiohttp": by_aiohttp, "urllib": by_urllib}


# httpx is followed where the path is one of OpenAI's, Anthropic's, Gemini's, Ollama's or Cohere's.
PATHS = dict.fromkeys(["httpx", "httpx2"], "/model/far/converse")


def told(caplog):
    return [record.message for record in caplog.records if "not recorded" in record.message]


@pytest.mark.parametrize("library", WAYS)
def test_calls_that_nothing_records_are_told_at_detach(library, tmp_path, caplog):
    pytest.importorskip(library)
    path = PATHS.get(library, "/chat/completions")
    caplog.set_level(logging.WARNING, "lightning_spans")
    with ScriptedServer() as server:
        with lightning_openai.attach(store=str(tmp_path / "x.db")):
            for _ in range(3):
                WAYS[library](f"{server.url}{path}?key=secret")
            openai.OpenAI(base_url=server.url, api_key="k").chat.completions.create(**BODY)
        WAYS[library](f"{server.url}{path}")
        (line,) = told(caplog)
        assert f"3 calls to {server.url.removeprefix('http://')}{path} were not recorded" in line
        assert "secret" not in line
        with lightning_openai.attach(store=str(tmp_path / "x.db")):
            pass
    assert len(told(caplog)) == 1


@pytest.mark.parametrize(
    ("method", "path", "is_one"),
    [
        ("POST", "/v1/chat/completions", True),
        ("POST", "/v1/completions/", True),
        ("POST", "/openai/deployments/x/chat/completions", True),
        ("POST", "/v1/responses", True),
        ("POST", "/v1/messages?beta=true", True),
        ("POST", "/api/chat", True),
        ("POST", "/v1beta/models/gemini:streamGenerateContent", True),
        ("POST", "/model/anthropic.claude/converse-stream", True),
        ("GET", "/v1/chat/completions", False),
        ("POST", "/v1/embeddings", False),
        ("POST", "/v1/traces", False),
        ("POST", "/survey/responses", False),
        ("POST", "/v1/messages/count_tokens", False),
    ],
)
def test_what_looks_like_a_model_call(method, path, is_one):
    assert is_model_call(method, path) is is_one


PROGRAM = """
import json, os, urllib.request
import lightning_openai
lightning_openai.attach()

def run(task):
    body = json.dumps({"model": "far", "messages": [{"role": "user", "content": "hello"}]}).encode()
    url = os.environ["FAR"] + "/chat/completions"
    urllib.request.urlopen(urllib.request.Request(url, body, {"content-type": "application/json"})).read()
    return 1.0
"""


def test_agents_tells_what_it_did_not_see(tmp_path, monkeypatch):
    pytest.importorskip("lightning_trainer.runner.runner", exc_type=ImportError)  # with all that the trainer needs
    (tmp_path / "far.py").write_text(PROGRAM)
    (tmp_path / "tasks.jsonl").write_text('{"q": 1}\n{"q": 2}\n')
    command = [sys.executable, "-m", "lightning_trainer.cli", "agents", "far:run", "--data", "tasks.jsonl"]
    with ScriptedServer() as server:
        monkeypatch.setenv("FAR", server.url)
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode != 0
        where = f"{server.url.removeprefix('http://')}/chat/completions"
    assert f"2 calls to {where} were not recorded" in done.stderr, done.stderr
