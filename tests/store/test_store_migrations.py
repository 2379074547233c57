"""A store of every past version opens, on both databases, with its data, and becomes as a new one is."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import inspect, text

from lightning_spans.store.sql.schema import MIGRATIONS, VERSION
from lightning_spans.store.sql.store import SqlStore

DATA = Path(__file__).parents[1] / "data"
PAST = range(1, VERSION)


def _in_sqlite(dump: str, folder: Path) -> str:
    path = folder / "old.db"
    with sqlite3.connect(path) as old:
        old.executescript(dump)
    return f"sqlite:///{path}"


def _in_postgresql(dump: str, url: str) -> str:
    import psycopg

    with psycopg.connect(url) as old:
        old.execute(dump.encode())
    return url


@pytest.fixture(params=["sqlite", "postgresql"])
def urls(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[int], tuple[str, str]]:
    """Return the URLs of a store of a past version and of a new one."""

    def make(version: int) -> tuple[str, str]:
        dump = (DATA / f"store_v{version}.{request.param}.sql").read_text()
        if request.param == "sqlite":
            return _in_sqlite(dump, tmp_path), f"sqlite:///{tmp_path}/new.db"
        fresh = request.getfixturevalue("fresh_postgres")
        return _in_postgresql(dump, fresh()), fresh()

    return make


@pytest.mark.parametrize("version", PAST)
def test_a_store_of_a_past_version_opens_with_its_data(urls: Callable[..., Any], version: int) -> None:
    """The dumps were written by those versions; they must open for ever."""
    store = SqlStore(urls(version)[0])
    (span,), (call,), (reward,) = store.spans(), store.calls(), store.rewards()
    assert (span.agent, span.attributes["gen_ai.response.id"]) == ("writer", "chatcmpl-1")
    assert call.choices[1].token_ids == (5, 6, 7)
    assert call.choices[0].logprobs == (-0.1, -0.25)
    assert reward.value == 0.1
    assert [rollout.status for rollout in store.rollouts()] == ["succeeded", "queued"]
    assert {span.origin, call.origin, *(rollout.origin for rollout in store.rollouts())} == {"training"}
    assert store.spans(origin="live") == store.calls(origin="live") == []
    (claimed,) = store.claim("worker")
    assert claimed.fence == 2
    assert store.heartbeat([(claimed.attempt_id, 2)]) == []
    assert not store.consume_group("group 1", "another")
    store.close()


@pytest.mark.filterwarnings("ignore:Skipped unsupported reflection")
@pytest.mark.parametrize("version", PAST)
def test_a_store_brought_up_to_date_is_as_a_new_one(urls: Callable[..., Any], version: int) -> None:
    old, new = (SqlStore(url) for url in urls(version))
    assert _shape(old) == _shape(new)
    old.close()
    new.close()


def _shape(store: SqlStore) -> dict[str, Any]:
    seen = inspect(store._engine)
    with store._engine.connect() as connection:  # SQLAlchemy does not see indexes on expressions there
        sqlite = connection.dialect.name == "sqlite"
        written = text("SELECT sql FROM sqlite_master WHERE name = 'spans_by_id'")
        by_id = connection.scalar(written) if sqlite else ""
    assert "coalesce" in by_id or not sqlite
    return {"spans_by_id": by_id} | {
        table: (
            [(c["name"], str(c["type"]), c["nullable"], str(c["default"])[:10]) for c in seen.get_columns(table)],
            sorted((i["name"] or "", i["column_names"], bool(i["unique"])) for i in seen.get_indexes(table)),
            sorted(u["column_names"] for u in seen.get_unique_constraints(table)),
            seen.get_pk_constraint(table)["constrained_columns"],
        )
        for table in sorted(seen.get_table_names())
    }


def test_every_past_version_has_its_migration_and_its_dumps() -> None:
    assert sorted(MIGRATIONS) == list(range(2, VERSION + 1))
    for version in PAST:
        for database in ("sqlite", "postgresql"):
            assert (DATA / f"store_v{version}.{database}.sql").exists()
