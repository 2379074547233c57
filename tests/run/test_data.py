from __future__ import annotations

import datetime as dt
import hashlib
import json
import random
import sys
from collections import Counter
from collections.abc import MutableSequence
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_spans.errors import DataError
from lightning_trainer.run.data import batch_at, count_shared, digest, load_tasks


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


def test_csv_values_may_be_long(tmp_path: Path) -> None:
    document = "y" * 140_000  # more than the csv module allows by default
    assert load_tasks(file(tmp_path, "t.csv", f"q,document\nx,{document}\n")) == [{"q": "x", "document": document}]


def test_csv_values_may_hold_line_breaks(tmp_path: Path) -> None:
    assert load_tasks(file(tmp_path, "t.csv", 'q,a\n"one\ntwo",3\n')) == [{"q": "one\ntwo", "a": "3"}]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("t.jsonl", '{"a": \n', "line 1: not JSON"),
        ("t.jsonl", '{"a": 1}\n\n[1]\n2\n', "line 3: a row must be an object .* 2 of 3 rows can't be read"),
        ("t.jsonl", b'{"a": "\xff"}\n', "line 1: not UTF-8"),
        ("t.json", '[{"a": 1},\n {"a" 2}]', "line 2: not JSON"),
        ("t.json", '{"a": 1}', "must hold a list"),
        ("t.json", "[1]", "item 1 of the list"),
        ("t.csv", "a,b\n1,2,3\n", "line 2: not 2 values"),
        ("t.csv", 'a\n"x\n', "line 2: not CSV"),
        ("t.csv", "a,b,a\n1,2,3\n", "two columns are called 'a'. Rename one"),
        ("t.csv", "a;b\n1;2\n", "one column, 'a;b'. Separate values by commas"),
        ("t.json", '{"a": 1}\n{"a": 2}\n', "line 2: not JSON: .* name the file .jsonl"),
        ("t.jsonl", '[{"a": 1}, {"a": 2}]\n', "A list of rows is a .json file"),
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
    with pytest.raises(DataError, match="contains no data set"):
        load_tasks(tmp_path / "folder.jsonl")


def test_digest_changes_with_any_task_and_not_with_the_order_of_keys() -> None:
    assert digest([{"a": 1, "b": 2}]) == digest([{"b": 2, "a": 1}])
    assert digest([{"a": 1}]) != digest([{"a": 2}])
    assert digest([{"a": 1}]) != digest([{"a": 1}, {"a": 1}])


@pytest.mark.parametrize("count", [0, 1, 3])
def test_digest_is_that_of_the_list_without_its_whole_text(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    tasks = [{"q": f"{number} \u00e9", "a": None} for number in range(count)]
    expected = hashlib.sha256(json.dumps(tasks, sort_keys=True).encode()).hexdigest()[:16]
    dumps, written = json.dumps, list[object]()

    def recorded(value: object, **options: bool) -> str:
        written.append(value)
        return dumps(value, **options)

    monkeypatch.setattr(json, "dumps", recorded)
    assert digest(tasks) == expected
    assert written == tasks, "one task at a time"


def test_an_epoch_is_shuffled_once_for_all_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    shuffle, orders = random.Random.shuffle, list[list[int]]()

    def recorded(self: random.Random, values: MutableSequence[int]) -> None:
        shuffle(self, values)
        orders.append(list(values))

    monkeypatch.setattr(random.Random, "shuffle", recorded)
    taken = [batch_at(step, 50, 8, seed=20_261) for step in range(12) for _ in range(2)]  # two epochs
    assert len(orders) == 2
    assert [place for batch in taken[::2] for place in batch] == [*orders[0], *orders[1]][:96]
    expected = list(range(50))
    random.Random("20261/0").shuffle(expected)
    assert orders[0] == expected


def test_shared_tasks_are_counted_for_each_held_out_task() -> None:
    assert count_shared([{"a": 1, "b": 2}, {"a": 3}], [{"b": 2, "a": 1}, {"a": 1, "b": 2}, {"a": 4}]) == 2
    assert count_shared([{"a": 1}], []) == 0


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


ODD_ROWS = b"""\xef\xbb\xbf{"a": 1180591620717411303424, "b": [NaN, 1e400], "c": "\\ud83d"}
{"a": 1
{"a": 2, "a": 3}
{"a": "\xff"}
"""


def test_rows_that_cannot_be_read_are_left_out_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = file(tmp_path, "t.jsonl", ODD_ROWS)
    assert load_tasks(path) == load_tasks(path) == [{"a": 2**70, "b": [None, None], "c": "\ufffd"}, {"a": 3}]
    (warned,) = caplog.messages
    assert "2 of 4 rows are left out. line 2: not JSON" in warned
    assert "line 4: not UTF-8" in warned
    assert load_tasks(file(tmp_path, "t.csv", "a,b\n1,2\n3\n")) == [{"a": "1", "b": "2"}]
    assert "line 3: not 2 values" in caplog.messages[-1]


@pytest.mark.parametrize(
    ("value", "kind"),
    [(dt.datetime(2026, 1, 1), "timestamp"), (b"x", "binary"), (Decimal(1), "decimal"), ([{"x": dt.date.max}], "date")],
)
def test_a_column_that_json_cannot_hold_is_refused_by_name_unless_it_is_left_out(
    tmp_path: Path, value: object, kind: str
) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pa.table({"q": ["one"], "n": [1.0], "x": [value]}), path := tmp_path / "tasks.parquet")
    with pytest.raises(DataError, match=f"column 'x' holds {kind}.* --columns q,n"):
        load_tasks(path)
    assert load_tasks(path, ["n", "q"]) == [{"n": 1.0, "q": "one"}]
    with pytest.raises(DataError, match=r"has no column 'z'\. It has q, n, x"):
        load_tasks(path, ["z"])
    with pytest.raises(DataError, match="has a column 'z'"):
        load_tasks(file(tmp_path, "t.jsonl", '{"q": 1}\n'), ["z"])


@pytest.mark.parametrize("extension", [True, False])
def test_columns_of_json_are_read_as_data(tmp_path: Path, extension: bool) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    texts = pa.array(['{"x": 1180591620717411303424}', None])
    nested = pa.StructArray.from_arrays([pa.ListArray.from_arrays([0, 1, 2], texts)], ["calls"])
    if extension:
        kind = pa.json_(pa.string())
        calls = pa.ListArray.from_arrays([0, 1, 2], texts.cast(kind))
        table = pa.table({"a": texts.cast(kind), "b": pa.StructArray.from_arrays([calls], ["calls"])})
    else:
        made_of = {"a": {"_type": "Json"}, "b": {"calls": {"_type": "List", "feature": {"_type": "Json"}}}}
        features = {"huggingface": json.dumps({"info": {"features": made_of}})}
        table = pa.table({"a": texts, "b": nested}).replace_schema_metadata(features)
    parquet.write_table(table, tmp_path / "tasks.parquet")
    big = {"x": 2**70}
    assert load_tasks(tmp_path / "tasks.parquet") == [
        {"a": big, "b": {"calls": [big]}},
        {"a": None, "b": {"calls": [None]}},
    ]


def test_parquet_without_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tasks.parquet").write_text("x")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"pip install pyarrow"):
        load_tasks(tmp_path / "tasks.parquet")


def test_a_folder_of_several_splits_or_of_nothing_says_so(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="contains no data set"):
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
