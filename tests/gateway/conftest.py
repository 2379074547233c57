"""A gateway over a scripted engine, and a client of it with the key of an attempt."""

from __future__ import annotations

import pytest

from lightning_trainer.gateway.settings import Routing
from support.fakes import FakeEngine, served


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with served(tmp_path_factory.mktemp("gateway"), FakeEngine(version=7)) as running:
        yield running


@pytest.fixture
def attempt(request, server):
    """A name of its own for each test's attempt; the engine starts afresh."""
    server.engine.play(())
    server.engine.prompts.clear()
    server.engine.samplings.clear()
    server.app.state.routing = Routing()
    return request.node.name


@pytest.fixture
def client(server, attempt):
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=server.key(attempt), max_retries=0) as made:
        yield made
