"""`lightning-rl prune` deletes what it is told to, and nothing without being told."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from lightning_conformance.stores.samples import a_call, a_span
from lightning_spans.schema.attempts import Rollout
from lightning_spans.store import Store, open_store
from lightning_spans.store.sql import sqlite
from lightning_spans.terms import TERMS, make_terms
from lightning_trainer.cli import LazyGroup

DAY_NS = 86_400 * 10**9


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "s.db"


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    store = open_store(str(path))
    now = time.time_ns()
    for origin in ("live", "training"):
        for days in (1, 40):
            at = now - days * DAY_NS
            store.add_spans([a_span(name=f"{origin} {days}", origin=origin, start_ns=at, end_ns=at)])
    yield store
    store.close()


def prune(path: Path, *given: str, answer: str | None = None):
    return CliRunner().invoke(LazyGroup(), ["prune", "--store", str(path), *given], input=answer)


def test_old_traces_of_an_origin_go_and_the_others_stay(path: Path, store: Store) -> None:
    done = prune(path, "--origin", "live", "--older-than", "30d", "--yes")
    assert (done.exit_code, "deleted: 1 " in done.output) == (0, True), done.output
    assert sorted(span.name for span in store.spans()) == ["live 1", "training 1", "training 40"]
    assert prune(path, "--older-than", "0.5w", "--yes").exit_code == 0
    assert sorted(span.name for span in store.spans()) == ["live 1", "training 1"]


def test_a_store_that_is_not_there_is_told_before_anything_is_asked(path: Path) -> None:
    done = prune(path, "--origin", "live")
    assert (done.exit_code, "Delete" in done.output) == (2, False)


def test_it_asks_before_it_deletes(path: Path, store: Store) -> None:
    assert prune(path, "--older-than", "1h", answer="n\n").exit_code == 2
    nobody = prune(path, "--older-than", "1h")
    assert (nobody.exit_code, "add --yes" in nobody.output) == (2, True)
    assert len(store.spans()) == 4
    assert prune(path, "--trace", store.spans()[0].trace_id, answer="y\n").exit_code == 0
    assert len(store.spans()) == 3


@pytest.mark.parametrize("named", ["--rollout", "--trace"])
def test_an_id_that_is_not_there_is_told_by_the_status(path: Path, store: Store, named: str) -> None:
    done = prune(path, named, "nowhere", "--yes")
    assert done.exit_code == 2
    assert "nothing was deleted" in done.output
    assert prune(path, "--origin", "nobodys", "--yes").exit_code == 0  # nothing is old enough, day by day


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ((), "say what to delete"),
        (("--older-than", "30"), "such as 30d"),
        (("--rollout", "a", "--trace", "b"), "either"),
    ],
)
def test_what_makes_no_sense_deletes_nothing(path: Path, store: Store, given: tuple[str, ...], says: str) -> None:
    done = prune(path, *given, "--yes")
    assert done.exit_code != 0
    assert says in done.output
    assert len(store.spans()) == 4


def test_a_tenants_call_in_the_trace_of_an_attempt_is_deleted_and_the_attempt_stays(path: Path, store: Store) -> None:
    store.enqueue([Rollout(rollout_id="r", group_id="g", task={})])
    [attempt] = store.claim("w")
    own = a_span(rollout_id="r", attempt_id=attempt.attempt_id)
    store.add_spans([own])
    terms = {TERMS: make_terms(tenant="acme")}
    store.add_calls([a_call(origin="live", trace_id=own.trace_id, span_id=own.span_id, sampling=terms)])
    done = prune(path, "--tenant", "acme", "--yes")
    assert (done.exit_code, "deleted: 1 " in done.output) == (0, True), done.output
    assert store.calls() == []
    assert store.spans(attempt_ids=[attempt.attempt_id]) == [own]


def _holds(path: Path, text: str) -> list[str]:
    """Which of the store's files hold a text."""
    return [file.name for file in path.parent.glob(f"{path.name}*") if text.encode() in file.read_bytes()]


@pytest.mark.parametrize("compact", [(), ("--compact",)], ids=["in steps", "compact"])
def test_deleted_text_leaves_the_disk(path: Path, store: Store, compact: tuple[str, ...]) -> None:
    """Small texts and long ones, which lie in pages of their own; of one trace among many, and of all."""
    now = time.time_ns()
    for place in range(200):
        text = f"kept {place} " if place % 2 else f"SECRET {place} "
        attributes = {"lightning.request": text * (2000 if place % 20 < 2 else 20)}
        store.add_spans(
            [a_span(origin="odd" if place % 2 else "live", attributes=attributes, start_ns=now, end_ns=now)]
        )
    assert _holds(path, "SECRET")
    assert prune(path, "--origin", "live", "--yes", *compact).exit_code == 0
    assert _holds(path, "SECRET") == []
    assert _holds(path, "kept 101")
    assert len(store.spans(origin="odd")) == 100


def test_a_reader_holds_up_only_the_emptying_of_the_log(
    path: Path, store: Store, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "_EMPTIED_S", 0.2)
    with sqlite3.connect(path) as reader:
        reader.execute("BEGIN")
        assert reader.execute("SELECT count(*) FROM spans").fetchone() == (4,)
        assert store.delete(origin="live") == 2
        assert "is being read" in caplog.text
        assert store.add_spans([a_span()]) == 1
    assert store.delete(origin="training") == 3
    assert path.with_name(f"{path.name}-wal").stat().st_size == 0
