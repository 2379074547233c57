from __future__ import annotations

import datetime as dt
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_spans.errors import DataError
from lightning_trainer.run.data import batch_at, digest, load_tasks


def file(folder: Path, name: str, text: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_json_lines_json_and_csv_give_the_same_tasks(tmp_path: Path) -> None:
    expected = [{"question": "a\u2028b", "answer": "1"}, {"question": "c", "answer": "2"}]
    lines = '{"question": "a\u2028b", "answer": "1"}\n\n{"question": "c", "answer": "2"}\n'
    assert load_tasks(file(tmp_path, "t.jsonl", lines)) == expected
    listed = '\ufeff[{"question": "a\u2028b", "answer": "1"},\n {"question": "c", "answer": "2"}]'
    assert load_tasks(file(tmp_path, "t.json", listed)) == expected
    assert load_tasks(file(tmp_path, "t.csv", 'question,answer\n"a\u2028b",1\nc,2\n')) == expected


def test_csv_values_may_hold_line_breaks(tmp_path: Path) -> None:
    assert load_tasks(file(tmp_path, "t.csv", 'q,a\n"one\ntwo",3\n')) == [{"q": "one\ntwo", "a": "3"}]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("t.jsonl", '{"a": 1}\n{"a": \n', "line 2: not JSON"),
        ("t.jsonl", '{"a": 1}\n\n[1]\n', "line 3: a task must be an object"),
        ("t.jsonl", '{"a": NaN}\n', "line 1: not JSON: NaN"),
        ("t.jsonl", '{"a": 123456789012345678901234567890}\n', "line 1: this task can't be stored"),
        ("t.jsonl", b'{"a": 1}\n{"a": "\xff"}\n', "line 2: not UTF-8"),
        ("t.json", '[{"a": 1},\n {"a" 2}]', "line 2: not JSON"),
        ("t.json", '{"a": 1}', "must hold a list"),
        ("t.json", "[1]", "item 1 of the list"),
        ("t.csv", "a,b\n1,2\n3\n", "line 3: not 2 values"),
        ("t.csv", "a,b\n1,2,3\n", "line 2: not 2 values"),
        ("t.csv", 'a\n"x\n', "line 2: not CSV"),
        ("t.csv", "a,b,a\n1,2,3\n", "two columns are called 'a'. Rename one"),
        ("t.csv", "a;b\n1;2\n", "one column, 'a;b'. Separate values by commas"),
        ("t.json", '{"a": 1}\n{"a": 2}\n', "line 2: not JSON: .* name the file .jsonl"),
        ("t.jsonl", '[{"a": 1}, {"a": 2}]\n', "A list of tasks is a .json file"),
        ("t.jsonl", "", "is empty"),
        ("t.jsonl", "\n \n", "is empty"),
        ("t.json", "", "is empty"),
        ("t.json", "[]", "is empty"),
        ("t.csv", "a,b\n", "is empty"),
        ("t.xlsx", "x", "unknown kind '.xlsx'"),
    ],
)
def test_bad_files_are_errors_that_say_where(tmp_path: Path, name: str, text: str | bytes, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        load_tasks(file(tmp_path, name, text))
    assert name in str(caught.value)


def test_missing_file_and_folder_are_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        load_tasks(tmp_path / "none.jsonl")
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(DataError, match="holds no data set"):
        load_tasks(tmp_path / "folder.jsonl")


def test_digest_changes_with_any_task_and_not_with_the_order_of_keys() -> None:
    assert digest([{"a": 1, "b": 2}]) == digest([{"b": 2, "a": 1}])
    assert digest([{"a": 1}]) != digest([{"a": 2}])
    assert digest([{"a": 1}]) != digest([{"a": 1}, {"a": 1}])


@given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 1000))
def test_every_epoch_takes_every_task_once(tasks: int, size: int, seed: int) -> None:
    steps = -(-2 * tasks // size)
    taken = [index for step in range(steps) for index in batch_at(step, tasks, size, seed)]
    assert Counter(taken[:tasks]) == Counter(range(tasks))
    assert Counter(taken[tasks : 2 * tasks]) == Counter(range(tasks))


def test_order_follows_from_the_seed_and_differs_between_epochs() -> None:
    assert batch_at(3, 50, 8, seed=1) == batch_at(3, 50, 8, seed=1)
    assert batch_at(0, 50, 50, seed=1) != batch_at(0, 50, 50, seed=2)
    assert batch_at(0, 50, 50, seed=1) != batch_at(1, 50, 50, seed=1)


def test_a_parquet_file_and_a_data_sets_folder_are_tasks(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pa.Table.from_pylist(TASKS := [{"q": "one", "n": 1}, {"q": "two", "n": 2}])
    parquet.write_table(table, tmp_path / "tasks.parquet")
    assert load_tasks(tmp_path / "tasks.parquet") == TASKS
    (tmp_path / "set").mkdir()
    file = str(tmp_path / "set" / "data-00000-of-00001.arrow")
    with pa.OSFile(file, "wb") as sink, pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    assert load_tasks(tmp_path / "set") == TASKS
    (tmp_path / "broken.parquet").write_text("no parquet" * 20)
    with pytest.raises(DataError, match=r"can't be read: .*[^.]\.$"):
        load_tasks(tmp_path / "broken.parquet")


@pytest.mark.parametrize("value", [dt.datetime(2026, 1, 1), float("nan"), b"x"])
def test_parquet_values_that_no_task_can_keep_are_errors_with_their_row(tmp_path: Path, value: object) -> None:
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pa.table({"q": ["one", "two"], "x": [None, value]}), tmp_path / "tasks.parquet")
    with pytest.raises(DataError, match="row 2: this task can't be stored"):
        load_tasks(tmp_path / "tasks.parquet")


def test_parquet_without_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tasks.parquet").write_text("x")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"pip install pyarrow"):
        load_tasks(tmp_path / "tasks.parquet")


def test_a_folder_of_several_splits_or_of_nothing_says_so(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no data set"):
        load_tasks(tmp_path)
    (tmp_path / "dataset_dict.json").write_text("{}")
    (tmp_path / "train").mkdir()
    with pytest.raises(DataError, match=r"Name one of them: .*train"):
        load_tasks(tmp_path)
    (tmp_path / "train" / "part.jsonl").write_text('{"q": 1}\n')
    assert load_tasks(tmp_path / "train") == [{"q": 1}]


def split(folder: Path, name: str, *, tasks: int = 1) -> Path:
    """Write a Parquet file whose tasks name it."""
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.table({"q": [name] * tasks}), path)
    return path


TRAIN = ("data/train-00000-of-00002-5f1c.parquet", "data/train-00001-of-00002-07ab.parquet")


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ("data/test-00000-of-00001.parquet", "data/test-00000-of-00001.parquet"),
        ("hard/train-00000-of-00001.parquet", "hard/train-00000-of-00001.parquet"),
    ],
)
def test_splits_and_configurations_in_one_folder_are_not_read_as_one(tmp_path: Path, other: str, named: str) -> None:
    for name in TRAIN:
        split(tmp_path, name)
    assert [task["q"] for task in load_tasks(tmp_path)] == list(TRAIN)
    split(tmp_path, other)
    pattern = f"{tmp_path}/data/train-*-of-*.parquet"
    with pytest.raises(DataError, match="holds several splits") as refused:
        load_tasks(tmp_path)
    assert f"'{pattern}'" in str(refused.value)
    assert str(tmp_path / named) in str(refused.value)
    assert [task["q"] for task in load_tasks(Path(pattern))] == list(TRAIN)
    assert [task["q"] for task in load_tasks(tmp_path / other)] == [other]


def test_json_lines_of_several_splits_are_not_read_as_one(tmp_path: Path) -> None:
    file(tmp_path, "tasks-1.jsonl", '{"q": 1}\n')
    file(tmp_path, "tasks-2.jsonl", '{"q": 2}\n')
    assert load_tasks(tmp_path) == [{"q": 1}, {"q": 2}]
    file(tmp_path, "test.jsonl", '{"q": 3}\n')
    with pytest.raises(DataError, match=r"Name one of them: '.*tasks-\[0-9\]\*\.jsonl', .*test\.jsonl"):
        load_tasks(tmp_path)
    assert load_tasks(tmp_path / "tasks-[0-9]*.jsonl") == [{"q": 1}, {"q": 2}]
    with pytest.raises(DataError, match="does not exist"):
        load_tasks(tmp_path / "none-*.jsonl")


@pytest.mark.parametrize("has_state", [True, False])
def test_caches_beside_a_saved_data_set_are_no_tasks(tmp_path: Path, has_state: bool) -> None:
    pa = pytest.importorskip("pyarrow")
    tables = {"data-00000-of-00001": {"q": ["a", "b"]}, "cache-1f2e3d": {"indices": [1, 0]}}
    for name, columns in tables.items():
        table = pa.table(columns)
        with pa.OSFile(str(tmp_path / f"{name}.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table)
    if has_state:
        file(tmp_path, "state.json", '{"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}')
    assert load_tasks(tmp_path) == [{"q": "a"}, {"q": "b"}]
    file(tmp_path, "state.json", "{}")
    with pytest.raises(DataError, match="names no _data_files"):
        load_tasks(tmp_path)
