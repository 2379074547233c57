"""Keys of attempts that have ended: after a restart, after a deletion, and when an id is used again."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import httpx
import pytest

from lightning_spans.schema.attempts import Rollout
from lightning_spans.store import open_store
from lightning_spans.store.http import HttpStore
from lightning_trainer.gateway.app import create_app
from lightning_trainer.gateway.auth.ended_attempts import RECHECK_S
from lightning_trainer.gateway.auth.keys import Keys
from lightning_trainer.gateway.http.serving import ServerThread
from support.fakes import FakeEngine
from support.gateway.surfaces import SURFACES


class Servers:
    """Servers on one store with one secret: a restart is another one."""

    def __init__(self, folder, stack: ExitStack) -> None:
        self.store = open_store(str(folder / "store.db"))
        self.keys = Keys.fresh()
        self._stack = stack
        stack.callback(self.store.close)

    def start(self, store=None) -> str:
        thread = ServerThread(create_app(store or self.store, keys=self.keys, engine=FakeEngine()))
        url = thread.start()
        self._stack.callback(thread.stop)
        return url

    def claimed(self, url: str):
        self.store.enqueue([Rollout(rollout_id="r", group_id="g", task={})])
        runner = HttpStore(url, key=self.keys.issue("runner"))
        (attempt,) = runner.claim("w")
        runner.close()
        return attempt

    def finish(self, attempt) -> None:
        self.store.finish(attempt.attempt_id, attempt.fence, status="succeeded")


@pytest.fixture
def servers(tmp_path):
    with ExitStack() as stack:
        yield Servers(tmp_path, stack)


def status(url: str, key: str | None) -> int:
    body, headers = SURFACES["/v1/chat/completions"]("hi"), {"authorization": f"Bearer {key}"}
    return httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=60).status_code


class Held:
    """A store whose answer about attempts waits until it is let go."""

    def __init__(self, inner) -> None:
        self._inner = inner
        self.asked, self.released = threading.Event(), threading.Event()
        self.questions = 0

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def attempts(self, **filters):
        self.questions += 1
        self.asked.set()
        assert self.released.wait(60)
        return self._inner.attempts(**filters)


def test_nobody_is_let_in_while_the_store_is_asked_after_a_restart(servers):
    attempt = servers.claimed(servers.start())
    servers.finish(attempt)
    held = Held(servers.store)
    url = servers.start(held)
    with ThreadPoolExecutor(20) as pool:
        burst = [pool.submit(status, url, attempt.context.key) for _ in range(20)]
        assert held.asked.wait(60)
        assert httpx.get(f"{url}/v1/models").status_code == 401  # the loop is free; those who wait do so beside it
        assert not any(one.done() for one in burst)
        held.released.set()
        assert {one.result() for one in burst} == {401}
    assert servers.store.calls(attempt_ids=[attempt.attempt_id]) == []
    assert held.questions < 20  # many requests, few questions


def test_an_attempt_that_the_store_does_not_know_has_ended(servers):
    url = servers.start()
    attempt = servers.claimed(url)
    assert status(url, attempt.context.key) == 200
    servers.finish(attempt)
    servers.store.delete(rollout_ids=["r"])
    assert status(servers.start(), attempt.context.key) == 401


def test_a_key_opens_no_later_attempt_that_uses_its_id_again(servers):
    url = servers.start()
    first = servers.claimed(url)
    assert status(url, first.context.key) == 200
    servers.finish(first)
    servers.store.delete(rollout_ids=["r"])
    other = servers.start()
    second = servers.claimed(other)
    assert (second.attempt_id, second.fence) != (first.attempt_id, first.fence)
    assert second.attempt_id == first.attempt_id
    for each in (other, servers.start()):
        assert (status(each, first.context.key), status(each, second.context.key)) == (401, 200)
        assert (status(each, first.context.key), status(each, second.context.key)) == (401, 200)


def test_an_end_told_to_one_server_is_soon_known_to_the_others(servers, monkeypatch):
    assert RECHECK_S <= 1.0
    url, other = servers.start(), servers.start()
    attempt = servers.claimed(url)
    assert status(other, attempt.context.key) == 200
    runner = HttpStore(url, key=servers.keys.issue("runner"))
    runner.finish(attempt.attempt_id, attempt.fence, status="succeeded")
    runner.close()
    assert status(url, attempt.context.key) == 401
    while status(other, attempt.context.key) == 200:
        pass  # for a second at most; the test's own limit bounds it
    assert status(other, attempt.context.key) == 401
