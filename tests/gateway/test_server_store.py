"""The store of a real server over HTTP keeps every promise of a store, and bears a bad network with either database."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager

import pytest

from lightning_conformance import StoreConformance
from lightning_conformance.plugins.faults import FAULTS, Fault
from lightning_conformance.stores.faults import some_work
from lightning_spans.store import Store, open_store
from lightning_spans.store.http import HttpStore
from lightning_trainer.gateway.app import create_app
from lightning_trainer.gateway.auth.keys import Keys
from lightning_trainer.gateway.http.serving import ServerThread
from support.cutting import cutting


@pytest.fixture(scope="module")
def keys() -> Keys:
    return Keys.fresh()


@contextmanager
def serve(url: str, keys: Keys) -> Iterator[tuple[str, Store]]:
    with closing(open_store(url)) as behind:
        thread = ServerThread(create_app(behind, keys=keys))
        yield thread.start(), behind
        thread.stop()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, keys: Keys) -> Iterator[tuple[str, Store]]:
    with serve(str(tmp_path_factory.mktemp("store") / "lightning.db"), keys) as served:
        yield served


class TestServedStore(StoreConformance):
    @pytest.fixture
    def store(self, reopen: Callable[[], Store], server: tuple[str, Store]) -> Iterator[Store]:
        yield reopen()
        _, behind = server
        behind.cancel([rollout.rollout_id for rollout in behind.rollouts()])  # the next test finds an empty queue

    @pytest.fixture
    def reopen(self, server: tuple[str, Store], keys: Keys) -> Callable[[], Store]:
        return lambda: HttpStore(server[0], key=keys.issue("admin"))


def test_an_attempt_claimed_over_http_comes_with_its_context(server: tuple[str, Store], keys: Keys):
    from lightning_conformance.stores.samples import a_rollout

    url, behind = server
    runner = HttpStore(url, key=keys.issue("runner"))
    behind.enqueue([a_rollout()])
    (attempt,) = runner.claim("worker")
    assert attempt.context is not None
    assert attempt.context.endpoint == url
    assert keys.check(str(attempt.context.key)).attempt_id == attempt.attempt_id
    runner.finish(attempt.attempt_id, attempt.fence, status="succeeded")


PATHS = ("rollouts", "rollouts/cancel", "claims", "heartbeats", "finish", "spans", "calls", "rewards", "query")


@pytest.mark.parametrize("path", PATHS)
def test_a_network_that_fails_costs_nothing_but_time(server: tuple[str, Store], keys: Keys, path: str) -> None:
    url, behind = server

    def plan(asked: str, number: int) -> Fault | None:
        return FAULTS[number] if asked.endswith(f"/{path}") and number < len(FAULTS) else None

    with cutting(url, plan) as proxy:
        work = some_work(HttpStore(proxy, key=keys.issue("admin")))
        work.run()
        work.store.close()
    work.check(behind)


@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
def test_a_network_that_fails_all_the_time_costs_nothing_but_time(
    request: pytest.FixtureRequest, keys: Keys, database: str
) -> None:
    with ExitStack() as stack:
        if database == "sqlite":
            url, behind = request.getfixturevalue("server")
        else:
            url, behind = stack.enter_context(serve(request.getfixturevalue("fresh_postgres")(), keys))
        draws = random.Random(7)
        proxy = stack.enter_context(cutting(url, lambda *_: draws.choice((*FAULTS, *[None] * 8))))
        work = some_work(HttpStore(proxy, key=keys.issue("admin")))
        work.queue()
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(lambda _: work.do(), range(3)))
        work.store.close()
        work.check(behind)
