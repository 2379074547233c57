"""What the attacks are made on: a server with an engine, and one with an upstream that the attacker owns."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from lightning_spans.schema.attempts import Rollout
from support.fakes import FakeEngine, Served, served


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("target"), FakeEngine()) as running:
        yield running


@pytest.fixture
def ask(server):
    """Send a request with a key, any path; gives the answer."""
    with httpx.Client(base_url=server.url, timeout=30) as client:

        def send(method: str, path: str, key: str | None = None, **options) -> httpx.Response:
            headers = {**({"authorization": f"Bearer {key}"} if key else {}), **options.pop("headers", {})}
            return client.request(method, path, headers=headers, **options)

        yield send


@pytest.fixture
def running_attempt(server, request):
    """A rollout that a runner works on; gives the attempt with its context."""
    from lightning_spans.store.http import HttpStore

    server.store.enqueue([Rollout(rollout_id=f"r {request.node.name}", group_id="g", task={})])
    runner = HttpStore(server.url, key=server.keys.issue("runner"))
    (attempt,) = runner.claim("w")
    yield attempt
    runner.close()
