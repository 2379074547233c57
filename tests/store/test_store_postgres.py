"""PostgreSQL keeps every promise of a store, with several servers on one database."""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import event, text

from lightning_conformance import StoreConformance
from lightning_conformance.stores.samples import a_rollout, a_span
from lightning_spans.errors import ConfigError, RefusedError, StoreError
from lightning_spans.schema.spans import Span
from lightning_spans.store import Store, open_store
from lightning_spans.store.sql.store import SqlStore

psycopg = pytest.importorskip("psycopg", reason="needs lightning-spans[postgres]")


@pytest.fixture
def url(fresh_postgres: Callable[[], str]) -> str:
    return fresh_postgres()


@pytest.fixture
def opened(url: str) -> Iterator[Callable[[], SqlStore]]:
    stores: list[SqlStore] = []

    def open_one() -> SqlStore:
        stores.append(SqlStore(url))
        return stores[-1]

    yield open_one
    for store in stores:
        store.close()


class TestPostgresStore(StoreConformance):
    @pytest.fixture
    def store(self, opened: Callable[[], SqlStore]) -> Store:
        return opened()

    @pytest.fixture
    def reopen(self, opened: Callable[[], SqlStore]) -> Callable[[], Store]:
        return opened


OVERLAP = """
import sys
from lightning_spans.store.sql.store import SqlStore
from lightning_conformance.stores.samples import a_call, a_span

store = SqlStore(sys.argv[1])
numbers = list(range(200))
if sys.argv[2] == "back":
    numbers.reverse()
print("ready", flush=True)
sys.stdin.readline()
kept, batch = 0, int(sys.argv[3])
for first in range(0, 200, batch):
    some = numbers[first : first + batch]
    kept += store.add_spans([a_span(trace_id="t", span_id=str(n), attributes={"n": n}) for n in some])
    kept += store.add_calls([a_call(call_id=str(n), response_id=str(n), trace_id="t") for n in some])
store.close()
print(kept)
"""


@pytest.mark.parametrize("batch", [20, 100])  # few are inserted one by one, many are copied
def test_two_processes_that_send_the_same_records_keep_each_once(
    url: str, opened: Callable[[], SqlStore], batch: int
) -> None:
    store, pipe = opened(), subprocess.PIPE
    command = [sys.executable, "-c", OVERLAP, url]
    with (
        subprocess.Popen([*command, "forth", str(batch)], stdin=pipe, stdout=pipe, text=True) as one,
        subprocess.Popen([*command, "back", str(batch)], stdin=pipe, stdout=pipe, text=True) as other,
    ):
        for process in (one, other):
            assert process.stdout.readline() == "ready\n"
        for process in (one, other):
            process.stdin.write("go\n")
            process.stdin.flush()
        assert sum(int(process.stdout.read()) for process in (one, other)) == 400
    assert sorted(span.attributes["n"] for span in store.spans()) == list(range(200))
    calls = store.calls()
    assert len(calls) == 200
    assert {len(call.choices) for call in calls} == {1}


def test_a_writer_that_hangs_in_a_transaction_does_not_hold_up_claims(url: str, opened: Callable[[], SqlStore]) -> None:
    store = opened()
    rollouts = [a_rollout() for _ in range(3)]
    store.enqueue(rollouts)
    with psycopg.connect(url) as stuck:  # as a server that was stopped between its claim and its commit
        stuck.execute("SELECT 1 FROM rollouts WHERE rollout_id = %s FOR UPDATE", [rollouts[0].rollout_id])
        taken = store.claim("worker", limit=5)
    assert [attempt.rollout.rollout_id for attempt in taken] == [rollout.rollout_id for rollout in rollouts[1:]]
    assert [attempt.rollout.rollout_id for attempt in store.claim("worker")] == [rollouts[0].rollout_id]


def test_a_lease_renewed_while_it_runs_out_is_kept(opened: Callable[[], SqlStore]) -> None:
    one, other = opened(), opened()
    one.enqueue([a_rollout() for _ in range(20)])
    held = [(attempt.attempt_id, attempt.fence) for attempt in one.claim("worker", limit=20, lease_s=0.6)]
    until, lost, ended = time.monotonic() + 2.0, [], 0
    with ThreadPoolExecutor(2) as pool:
        while time.monotonic() < until:
            beat = pool.submit(one.heartbeat, held, lease_s=0.6)
            ended += len(pool.submit(other.claim, "thief", limit=20).result())
            lost += beat.result()
    assert (lost, ended) == ([], 0)


def test_a_rollout_cancelled_while_it_is_claimed_has_no_running_attempt(opened: Callable[[], SqlStore]) -> None:
    one, other = opened(), opened()
    rollouts = [a_rollout() for _ in range(40)]
    one.enqueue(rollouts)
    ids = [rollout.rollout_id for rollout in rollouts]
    with ThreadPoolExecutor(8) as pool:
        claims = [pool.submit(other.claim, "worker", limit=3) for _ in range(14)]
        cancels = [pool.submit(one.cancel, ids[first : first + 5]) for first in range(0, 40, 5)]
        assert sum(cancel.result() for cancel in cancels) == 40
        [claim.result() for claim in claims]
    assert {rollout.status for rollout in one.rollouts()} == {"cancelled"}
    assert not [attempt for attempt in one.attempts() if attempt.status == "running"]


def test_a_server_that_drops_its_connections_loses_nothing(url: str, opened: Callable[[], SqlStore]) -> None:
    store = opened()
    store.add_spans([a_span()])
    progress: queue.SimpleQueue[bool] = queue.SimpleQueue()  # on a busy machine, connecting takes longer than any pause

    def kill() -> None:
        with psycopg.connect(url, autocommit=True) as other:
            while progress.get():
                other.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()")

    def add(some: list[Span]) -> None:
        store.add_spans(some)
        progress.put(True)

    def count(_: int) -> int:
        found = len(store.spans(trace_ids=["t"]))
        progress.put(True)
        return found

    killer = threading.Thread(target=kill)
    killer.start()
    spans = [a_span(trace_id="t", attributes={"n": n}) for n in range(120)]
    try:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(add, [spans[first : first + 3] for first in range(0, 120, 3)]))
            counts = list(pool.map(count, range(20)))
    finally:
        progress.put(False)
        killer.join()
    assert counts == [120] * 20


def test_a_server_that_can_not_be_reached_is_named_without_the_password() -> None:
    with pytest.raises(StoreError, match=r"postgresql://me:\*\*\*@127\.0\.0\.1:1/db can't be opened") as failed:
        open_store("postgresql://me:secret@127.0.0.1:1/db")
    assert "secret" not in str(failed.value)


def test_a_missing_driver_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(ConfigError, match=r"pip install 'lightning-trainer\[postgres\]'"):
        open_store("postgresql://me@127.0.0.1:1/db")


def test_the_tables_of_another_program_are_left_alone(url: str) -> None:
    with psycopg.connect(url) as other:
        other.execute("CREATE TABLE invoices (id int)")
    with pytest.raises(StoreError, match=r"invoices.*not a store"):
        open_store(url)


def test_many_open_an_empty_database_at_once(url: str) -> None:
    with ThreadPoolExecutor(6) as pool:
        stores = list(pool.map(lambda _: SqlStore(url), range(6)))
    assert sum(store.add_spans([a_span()]) for store in stores) == 6
    for store in stores:
        store.close()


def test_what_is_acknowledged_is_on_disk_whatever_the_servers_default(url: str) -> None:
    store = SqlStore(f"{url}%20-csynchronous_commit%3Doff")
    with store._engine.connect() as connection:
        assert connection.scalar(text("SHOW synchronous_commit")) == "on"
    store.close()


def test_text_that_postgresql_refuses_harms_no_other_field(opened: Callable[[], SqlStore]) -> None:
    store = opened()
    odd = a_span(name="nul \0", attributes={"nul": "\0", "kept": "é"})
    assert store.add_spans([odd, a_span(trace_id=odd.trace_id)]) == 2
    found = next(span for span in store.spans(trace_ids=[odd.trace_id]) if span.span_id == odd.span_id)
    assert (found.name, found.attributes) == ("nul \\x00", odd.attributes)
    with pytest.raises(RefusedError):
        store.add_spans([a_span(rollout_id="nul \0")])


def test_one_of_many_that_postgresql_refuses_does_not_harm_the_next_ones(opened: Callable[[], SqlStore]) -> None:
    store = opened()
    good = [a_span() for _ in range(100)]
    with pytest.raises(RefusedError):
        store.add_spans([*good, a_span(rollout_id="nul \0")])
    assert store.spans() == []
    assert (store.add_spans([*good, *good]), store.add_spans(good)) == (100, 0)
    assert store.spans() == good


def test_a_connection_lost_in_the_middle_of_many_records_loses_none(url: str, opened: Callable[[], SqlStore]) -> None:
    store, killed = opened(), []

    def kill_once(_connection: Any, cursor: Any, _statement: str, rows: Any, *_: object) -> None:
        if not killed and len(rows) == 100:
            killed.append(cursor.connection.info.backend_pid)
            with psycopg.connect(url, autocommit=True) as other:
                other.execute("SELECT pg_terminate_backend(%s)", killed)

    event.listen(store._engine, "before_cursor_execute", kill_once)
    spans = [a_span() for _ in range(100)]
    assert store.add_spans(spans) == 100
    assert (len(killed), store.spans()) == (1, spans)


def test_many_records_of_a_user_who_may_make_no_temporary_tables_are_kept(url: str) -> None:
    schema = url.rpartition("%3D")[2]
    with psycopg.connect(url, autocommit=True) as admin:
        admin.execute(f"CREATE ROLE plain_{schema} LOGIN; GRANT ALL ON SCHEMA {schema} TO plain_{schema}")
        admin.execute("REVOKE TEMPORARY ON DATABASE postgres FROM PUBLIC")
    store = SqlStore(url.replace("postgres@", f"plain_{schema}@"))
    spans = [a_span() for _ in range(100)]
    assert (store.add_spans(spans), store.add_spans(spans)) == (100, 0)
    assert store.spans() == spans
    store.close()
    with psycopg.connect(url, autocommit=True) as admin:
        admin.execute("GRANT TEMPORARY ON DATABASE postgres TO PUBLIC")
