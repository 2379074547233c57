"""Groups are read as the run's that asks: whichever starts it had, and whoever shares its store."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_trainer.run.group_ids import Step, groups_of, name_start, step_of

FIRST, SECOND, OTHER = "x-0000aaaa", "x-0000bbbb", "x-2-0000cccc"


def test_a_step_that_began_again_counts_as_it_went_the_last_time() -> None:
    cut = [f"{FIRST}:t1-0", f"{FIRST}:t1-1", f"{FIRST}.1:v-0"]
    kept = [f"{FIRST}:t0-0", f"{FIRST}.0:v-0", f"{SECOND}:t1-0", f"{SECOND}:t1r1-0", f"{SECOND}.1:v-0"]
    found = groups_of([*kept[:2], *cut, *kept[2:]], Path("runs/x"))
    assert list(found) == kept
    assert found == {group: step_of(group) for group in kept}


def test_a_store_that_runs_share_is_read_by_the_name_of_the_folder() -> None:
    every = [f"{FIRST}:t0-0", f"{OTHER}:t0-0", "0000dddd:t0-0", "fork-0000eeee:t0-0-0-1"]
    assert list(groups_of(every, Path("runs/x"), shared=True)) == every[:1]
    assert list(groups_of(every, Path("runs/x-2"), shared=True)) == every[1:2]
    assert list(groups_of(every)) == every


def test_a_store_of_its_own_is_read_whatever_the_folder_was_called() -> None:
    groups = ["before-0000aaaa:t0-0", "before-0000aaaa:t1-0", "x-0000bbbb:t1-0", "fork-0000eeee:t0-0-0-1"]
    assert list(groups_of(groups, Path("runs/x"))) == [groups[0], *groups[2:]]


@pytest.mark.parametrize(
    ("group", "step"),
    [
        ("x-0000aaaa:t3-1", Step("train", 3)),
        ("x-0000aaaa:t3r2-1", Step("train", 3)),
        ("x-0000aaaa.2:t3-1", Step("train", 3)),
        ("a:b.c\n-0000aaaa.4:v-0", Step("val", 4)),
        ("x-0000aaaa:t3-1-0", Step("other", 0)),
        ("fork-0000aaaa:t3-1-0-2", Step("other", 0)),
    ],
)
def test_the_step_is_read_from_the_id(group: str, step: Step) -> None:
    assert step_of(group) == step


def test_a_place_that_came_again_is_of_the_same_start() -> None:
    groups = ["x-0000aaaa:t0-0", "x-0000aaaa.2:t0-0", "x-0000aaaa:t0-1"]
    assert list(groups_of(groups, Path("runs/x"), shared=True)) == groups


def test_starts_are_named_after_the_folder_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    start = name_start(Path())
    assert start != name_start(Path())
    assert list(groups_of([f"{start}:t0-0"], tmp_path, shared=True)) == [f"{start}:t0-0"]
