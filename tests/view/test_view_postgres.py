"""A store on PostgreSQL is viewed as one in a file is: the same answers, full-text search among them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lightning_spans.errors import StoreError
from lightning_spans.schema.attempts import Rollout
from lightning_spans.store import open_store
from lightning_trainer.kits.view.reader import StoreReader
from lightning_trainer.kits.view.runs import Runs
from support.training.example_runs import make_run
from support.view import Asked


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory, fresh_postgres: Callable[[], str]) -> tuple[Asked, Asked, str]:
    """The same run with its store in a file and on a server, and the server's URL."""
    url, home = fresh_postgres(), tmp_path_factory.mktemp("runs")
    make_run(home / "file" / "r", steps=2, groups=2, size=4)
    make_run(home / "server" / "r", steps=2, groups=2, size=4, store_url=url)
    return Asked(home / "file" / "r"), Asked(home / "server" / "r"), url


def without_times(value: Any) -> Any:
    """Leave out what no two runs have in common."""
    if isinstance(value, dict):
        drop = {"seconds", "last_s", "started_s", "updated_s", "options", "time", "commands"}
        return {name: without_times(inner) for name, inner in value.items() if name not in drop}
    return [without_times(inner) for inner in value] if isinstance(value, list) else value


def test_every_screen_says_the_same(both: tuple[Asked, Asked, str]) -> None:
    file, on_server, _ = both
    ids = [row["rollout_id"] for group in file("step", step=1)["groups"] for row in group["rollouts"]]
    call = next(event for event in file("rollout", rollout=ids[0])["events"] if event["turn"] == 0)
    asked: list[tuple[str, dict[str, Any]]] = [
        ("run", {}), ("scale", {}), ("step", {"step": 1}), ("step", {"step": 0, "mode": "val"}),
        ("facts", {"rollout": ids}), ("group", {"group": "r-0a1b2c3d:t1-0"}), ("rollout", {"rollout": ids[0]}),
        ("call", {"rollout": ids[0], "span": call["span_id"]}), ("account", {"step": 1}), ("credit", {"step": 1}),
        ("rewards", {"step": 1}), ("tools", {"step": 1}), ("fleet", {}), ("loose", {}), ("tries", {}),
        ("tries", {"group": "r-0a1b2c3d:t1-0"}),
    ]  # fmt: skip
    for what, params in asked:
        assert without_times(on_server(what, **params)) == without_times(file(what, **params)), what


@pytest.mark.parametrize(
    "text", ["invalid syntax", "INVALID Syntax", '"expression"', "with the calculator", "100% _no_ such thing"]
)
def test_search_finds_the_same(both: tuple[Asked, Asked, str], text: str) -> None:
    file, on_server, _ = both
    found = on_server("search", text=text)
    assert found == file("search", text=text)
    assert bool(found["hits"]) == ("such thing" not in text)
    assert on_server("search", text=text, calls=True) == file("search", text=text, calls=True)


def test_a_store_alone_is_named_by_its_url(both: tuple[Asked, Asked, str]) -> None:
    reader = StoreReader(Runs(store=both[2]).all()[0].store)
    assert len(reader.rollouts(group_ids=["r-0a1b2c3d:t1-0"])) == 4
    reader.close()


def test_the_viewer_can_not_write_there(both: tuple[Asked, Asked, str]) -> None:
    from sqlalchemy import text

    reader = StoreReader(both[2])
    with pytest.raises(StoreError, match="read-only transaction"), reader.reading() as connection:
        connection.execute(text("DELETE FROM rollouts"))
    reader.close()
    store = open_store(both[2])
    assert store.rollouts()
    store.close()


def test_marks_are_kept_there_and_whoever_looks_is_told(both: tuple[Asked, Asked, str]) -> None:
    _, on_server, _ = both
    run = Runs(store=both[2]).all()[0]
    rollout = on_server("step", step=1)["groups"][0]["rollouts"][0]["rollout_id"]
    before = run.changed
    on_server.post("marks", rollout_id=rollout, comment="first")
    first = run.changed
    on_server.post("marks", rollout_id=rollout, comment="second")
    assert len({before, first, run.changed}) == 3
    assert [mark["comment"] for mark in on_server("marks")["marks"]] == ["second"]
    on_server.post("marks", rollout_id=rollout, marked=False)
    assert on_server("marks")["marks"] == []


def test_what_is_written_to_a_store_without_a_folder_is_told(both: tuple[Asked, Asked, str]) -> None:
    run = Runs(store=both[2]).all()[0]
    seen = [run.changed, run.changed]
    assert seen[0] == seen[1]
    store = open_store(both[2])
    store.enqueue([Rollout(rollout_id="live-1", group_id="live", task={"q": "new"})])
    seen.append(run.changed)
    assert run.state == "idle"
    [attempt] = store.claim("runner/one")
    seen.append(run.changed)
    assert run.state == "running"
    store.finish(attempt.attempt_id, attempt.fence, status="succeeded")
    seen.append(run.changed)
    assert run.state == "idle"
    store.close()
    assert len(set(seen)) == 4
