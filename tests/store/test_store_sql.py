"""The SQLite store keeps every promise of a store, and those of a file that many share."""

from __future__ import annotations

import json
import random
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, event, text

from lightning_conformance import StoreConformance
from lightning_conformance.stores.faults import again, some_work
from lightning_conformance.stores.samples import a_call, a_reward, a_rollout, a_span
from lightning_spans.errors import ConfigError, RefusedError, StoreError, StoreGoneError
from lightning_spans.schema.calls import Call
from lightning_spans.schema.spans import Span
from lightning_spans.store import Store, open_store
from lightning_spans.store.protocol import Where, each
from lightning_spans.store.sql import read
from lightning_spans.store.sql.schema import VERSION
from lightning_spans.store.sql.store import SqlStore


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "lightning.db"


@pytest.fixture
def opened(path: Path) -> Iterator[Callable[..., SqlStore]]:
    stores: list[SqlStore] = []

    def open_one(**options: Any) -> SqlStore:
        stores.append(SqlStore(f"sqlite:///{path}", **options))
        return stores[-1]

    yield open_one
    for store in stores:
        store.close()


class TestSqlStore(StoreConformance):
    @pytest.fixture
    def store(self, opened: Callable[..., SqlStore]) -> Store:
        return opened()

    @pytest.fixture
    def reopen(self, opened: Callable[..., SqlStore]) -> Callable[[], Store]:
        return opened


CLAIM_ALL = """
import json, sys, time
from lightning_spans.store.sql.store import SqlStore

store = SqlStore(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
taken = []
while some := store.claim("worker", limit=3):
    taken += [attempt.rollout.rollout_id for attempt in some]
    for attempt in some:
        store.finish(attempt.attempt_id, attempt.fence, status="succeeded")
        time.sleep(0.001)  # let the other process in
store.close()
print(json.dumps(taken))
"""


def test_two_processes_claim_each_rollout_once(path: Path, opened: Callable[..., SqlStore]) -> None:
    rollouts = [a_rollout() for _ in range(60)]
    opened().enqueue(rollouts)
    command = [sys.executable, "-c", CLAIM_ALL, f"sqlite:///{path}"]
    pipe = subprocess.PIPE
    with (
        subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as one,
        subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as other,
    ):
        for process in (one, other):
            assert process.stdout.readline() == "ready\n"
        for process in (one, other):
            process.stdin.write("go\n")
            process.stdin.flush()
        taken = [json.loads(process.stdout.read()) for process in (one, other)]
    assert sorted(taken[0] + taken[1]) == sorted(rollout.rollout_id for rollout in rollouts)


def test_two_processes_open_a_new_file_at_once(path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        stores = list(pool.map(lambda _: SqlStore(f"sqlite:///{path}"), range(8)))
    assert sum(store.add_spans([a_span()]) for store in stores) == 8
    for store in stores:
        store.close()


def test_what_is_acknowledged_is_committed_with_full_sync(path: Path, opened: Callable[..., SqlStore]) -> None:
    store = opened()
    store.add_spans([a_span()])
    with sqlite3.connect(path) as other:  # sees committed rows only
        assert other.execute("SELECT count(*) FROM spans").fetchone() == (1,)
        assert other.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    with store._engine.connect() as connection:
        assert connection.scalar(text("PRAGMA synchronous")) == 2


def test_writes_that_wait_share_a_transaction(opened: Callable[..., SqlStore], monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened()
    sizes = []
    commit = store._writer._commit

    def counted(connection: Connection, writes: list[Any]) -> None:
        sizes.append(len(writes))
        commit(connection, writes)

    monkeypatch.setattr(store._writer, "_commit", counted)
    started, go_on = threading.Event(), threading.Event()

    def hold(_: Connection) -> None:
        started.set()
        go_on.wait(60)

    with ThreadPoolExecutor(33) as pool:
        holding = pool.submit(store._writer.do, hold)
        started.wait(60)
        adding = [pool.submit(store.add_spans, [a_span()]) for _ in range(32)]
        while store._writer.waiting < 32:
            time.sleep(0.001)
        go_on.set()
        assert sum(added.result() for added in adding) == 32
        holding.result()
    assert sizes == [1, 32]


def test_a_transaction_that_fails_as_a_whole_is_told_to_nobody_as_kept(opened: Callable[..., SqlStore]) -> None:
    store = opened()
    started, go_on = threading.Event(), threading.Event()

    def hold(_: Connection) -> None:
        started.set()
        go_on.wait(60)

    def break_all(connection: Connection) -> None:
        connection.exec_driver_sql("ROLLBACK")  # as SQLite does by itself when the disk is full
        raise OSError("disk full")

    good = [a_span() for _ in range(8)]
    with ThreadPoolExecutor(10) as pool:
        pool.submit(store._writer.do, hold)
        started.wait(60)
        adding = [pool.submit(store.add_spans, [span]) for span in good]
        breaking = pool.submit(store._writer.do, break_all)
        while store._writer.waiting < 9:
            time.sleep(0.001)
        go_on.set()
        assert sum(added.result() for added in adding) == 8
        with pytest.raises(StoreError, match="disk full"):
            breaking.result()
    assert len(store.spans()) == 8


def test_close_finishes_what_was_asked_for(path: Path) -> None:
    store = SqlStore(f"sqlite:///{path}")
    with ThreadPoolExecutor(8) as pool:
        adding = [pool.submit(store.add_spans, [a_span()]) for _ in range(50)]
        store.close()
    kept = sum(added.exception() is None for added in adding)
    with sqlite3.connect(path) as other:
        assert other.execute("SELECT count(*) FROM spans").fetchone() == (kept,)


def test_another_process_that_holds_the_file_is_waited_for(path: Path, opened: Callable[..., SqlStore]) -> None:
    store = opened()
    other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    threading.Timer(0.2, lambda: other.execute("COMMIT")).start()
    assert store.add_spans([a_span()]) == 1
    other.close()


@pytest.mark.parametrize("named", ["lightning.db", "sqlite:///lightning.db"])
def test_a_relative_path_names_the_file_of_the_folder_it_was_opened_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with closing(open_store(named)) as store:
        for folder in ("a", "b"):
            (tmp_path / folder).mkdir()
            monkeypatch.chdir(tmp_path / folder)
            store.add_spans([a_span(span_id=folder * 16)])
            assert list((tmp_path / folder).iterdir()) == []
    with closing(open_store(str(tmp_path / "lightning.db"))) as store:
        assert [span.span_id for span in store.spans()] == ["a" * 16, "b" * 16]


@pytest.mark.parametrize("replaced", [False, True], ids=["deleted", "replaced"])
def test_nothing_is_written_to_a_file_that_was_deleted(
    path: Path, opened: Callable[..., SqlStore], replaced: bool
) -> None:
    store = opened()
    store.add_spans([a_span()])
    for file in path.parent.glob(f"{path.name}*"):
        file.unlink()
    others = [a_span()] if replaced else []
    if replaced:
        opened().add_spans(others)
    for _ in range(2):
        with pytest.raises(StoreGoneError, match=r"deleted or replaced.*open the store again"):
            store.add_spans([a_span()])
    store.close()
    assert opened().spans() == others


def test_a_newer_schema_is_refused(path: Path, opened: Callable[..., SqlStore]) -> None:
    opened(version=VERSION + 1, migrations={VERSION + 1: lambda _: None}).close()
    with pytest.raises(StoreError, match=f"schema is version {VERSION + 1}.*Install the newer"):
        SqlStore(f"sqlite:///{path}")


def _add_a_column(connection: Connection) -> None:
    connection.execute(text("ALTER TABLE spans ADD COLUMN weight INTEGER NOT NULL DEFAULT 7"))


def test_an_older_schema_is_brought_up_to_date_with_its_data(path: Path, opened: Callable[..., SqlStore]) -> None:
    old = opened()
    span, call, reward, rollout = a_span(), a_call(), a_reward(), a_rollout()
    old.add_spans([span])
    old.add_calls([call])
    old.add_rewards([reward])
    old.enqueue([rollout])
    old.close()
    new = opened(version=VERSION + 1, migrations={VERSION + 1: _add_a_column})
    assert (new.calls(), new.rewards(), new.rollouts()) == ([call], [reward], [rollout])
    with sqlite3.connect(path) as other:
        assert other.execute("SELECT span_id, weight FROM spans").fetchall() == [(span.span_id, 7)]
        versions = other.execute("SELECT version FROM schema_version ORDER BY version").fetchall()
    assert versions == [(VERSION,), (VERSION + 1,)]


def test_an_upgrade_that_fails_leaves_the_file_as_it_was(path: Path, opened: Callable[..., SqlStore]) -> None:
    span = a_span()
    old = opened()
    old.add_spans([span])
    old.close()

    def fail(connection: Connection) -> None:
        _add_a_column(connection)
        connection.execute(text("INSERT INTO nowhere VALUES (1)"))

    with pytest.raises(StoreError, match="nowhere"):
        opened(version=VERSION + 1, migrations={VERSION + 1: fail})
    assert opened().spans() == [span]


def test_a_file_of_another_program_is_refused(path: Path) -> None:
    with sqlite3.connect(path) as other:
        other.execute("CREATE TABLE invoices (id)")
    with pytest.raises(StoreError, match=r"invoices.*not a store"):
        SqlStore(f"sqlite:///{path}")
    path.write_text("no database at all, but long enough to have a header" * 10)
    with pytest.raises(StoreError, match=r"not a database\. Is it the file of a store\? Are the file"):
        SqlStore(f"sqlite:///{path}")


def test_a_store_needs_a_file(tmp_path: Path) -> None:
    for url in ("sqlite://", "sqlite:///:memory:"):
        with pytest.raises(StoreError, match="needs a file"):
            open_store(url)
    with pytest.raises(StoreError, match="does not exist"):
        open_store(str(tmp_path / "nowhere" / "lightning.db"))
    with pytest.raises(StoreError, match="no store at"):
        open_store(str(tmp_path / "missing.db"), create=False)
    assert list(tmp_path.iterdir()) == []


def test_another_database_is_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"SQLite or PostgreSQL") as refused:
        SqlStore("mysql://user:secret@host/db")
    assert "secret" not in str(refused.value)
    with pytest.raises(ConfigError, match="the driver for PostgreSQL is psycopg"):
        open_store("postgresql+asyncpg://user:secret@host/db")
    with pytest.raises(ConfigError, match="unknown scheme"):
        open_store("ftp://host/db")


def test_a_record_that_can_not_be_kept_is_refused_alone(opened: Callable[..., SqlStore]) -> None:
    store = opened()
    with pytest.raises(RefusedError, match="can't store this record"):
        store.add_spans([a_span(attributes={"what": object()})])
    with pytest.raises(RefusedError, match="can't store this record"):
        store.add_calls([a_call(prompt_token_ids=(2**31,))])
    with pytest.raises(RefusedError, match="too large"):
        store.add_spans([a_span(start_ns=2**63)])
    with pytest.raises(RefusedError, match="NOT NULL"):
        store.add_spans([a_span(operation=None)])
    assert store.spans() == store.calls() == []


def test_reads_go_on_while_others_write(opened: Callable[..., SqlStore]) -> None:
    store = opened()
    with ThreadPoolExecutor(6) as pool:
        adding = [pool.submit(store.add_spans, [a_span(attempt_id="a") for _ in range(50)]) for _ in range(20)]
        counts = [pool.submit(lambda: len(store.spans(attempt_ids=["a"]))) for _ in range(20)]
        assert sum(added.result() for added in adding) == 1000
        assert all(count.result() % 50 == 0 for count in counts)  # whole transactions only
    assert len(store.spans(attempt_ids=["a"])) == 1000


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_commit_that_fails_costs_nothing_but_time(
    opened: Callable[..., SqlStore], monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    store = opened()
    commit, draws = store._engine.dialect.do_commit, random.Random(moment)

    def fail_often(connection: Any) -> None:
        failing = draws.random() < 0.3
        if moment == "after" or not failing:
            commit(connection)
        if failing:
            raise sqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr(store._engine.dialect, "do_commit", fail_often)
    work = some_work(store)
    with ThreadPoolExecutor(4) as pool:
        neighbours = [pool.submit(again, lambda: store.add_spans([a_span()])) for _ in range(40)]
        work.run()
        for neighbour in neighbours:
            neighbour.result()
    monkeypatch.undo()
    work.check(store)


def test_a_page_is_bounded_by_its_size_too(opened: Callable[..., SqlStore], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read, "_PAGE_BYTES", 5000)
    store = opened()
    spans = [a_span(attributes={"text": "x" * 3000}) for _ in range(5)]
    store.add_spans(spans)
    first = store.page(Span)
    assert (first.records, first.next is None) == (spans[:2], False)
    assert list(each(store, Span)) == spans == store.spans()
    calls = [a_call(prompt_token_ids=tuple(range(1000))) for _ in range(5)]
    store.add_calls(calls)
    assert [len(store.page(Call).records), list(each(store, Call))] == [2, calls]


@pytest.mark.parametrize("kind", [Span, Call])
@pytest.mark.parametrize("newest_first", [False, True])
def test_a_page_of_an_origin_is_read_from_the_index_without_sorting(
    path: Path, opened: Callable[..., SqlStore], kind: type[Any], newest_first: bool
) -> None:
    store = opened()
    asked: list[tuple[str, Any]] = []

    def note(_connection: Any, _cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        asked.append((statement, parameters))

    event.listen(store._engine, "before_cursor_execute", note)
    store.page(kind, Where(origin="live"), newest_first=newest_first)
    store.page(kind, Where(origin="live"), after=5, newest_first=newest_first)
    pages = [(statement, parameters) for statement, parameters in asked if "origin = ?" in statement]
    assert len(pages) == 2
    with closing(sqlite3.connect(path)) as connection:
        for statement, parameters in pages:
            plan = [row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {statement}", parameters)]
            assert len(plan) == 1, plan
            assert "_by_origin (origin=?" in plan[0]


def test_a_turn_that_is_never_given_back_delays_no_more_than_one_write(tmp_path: Path) -> None:
    """Whoever may open the store's files can hold the turn, a stopped process too."""
    import fcntl

    store = open_store(str(tmp_path / "s.db"))
    store.add_rewards([a_reward()])
    with (tmp_path / "s.db-turn").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        began = time.monotonic()
        for _ in range(5):
            store.add_rewards([a_reward()])
        took_s = time.monotonic() - began
    store.close()
    assert took_s < 20.0  # one write waits for a second; each of them waited for thirty
