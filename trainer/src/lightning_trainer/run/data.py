"""Task files: JSON Lines, a JSON list, CSV, Parquet, a Hugging Face data set's folder.

And the order of a run's tasks.
"""

from __future__ import annotations

import glob
import hashlib
import json
import random
import re
import shlex
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, TypeAlias

import orjson

from lightning_spans.errors import DataError
from lightning_spans.schema.json import read_json
from lightning_trainer.run.datafiles.arrow import arrow_rows
from lightning_trainer.run.datafiles.rows import DataRow, FaultyRows, csv_rows, finite, json_lines, json_list

Task: TypeAlias = dict[str, Any]

_STATE: Final = "state.json"  # written by `save_to_disk`
_CACHE: Final = re.compile(r"cache-.*\.arrow")
_SHARD: Final = re.compile(r"-\d+-of-\d+.*")
_NUMBER: Final = re.compile(r"\d+")


def load_tasks(path: Path, columns: Sequence[str] = ()) -> list[Task]:
    """Read all tasks of a file, or of all files that a pattern names; the name's ending tells the kind.

    A row that can't be read is left out, and a warning names it. NaN and the infinities become None.

    Args:
        path: ``.jsonl`` or ``.ndjson`` (an object a line), ``.json`` (a list of objects), ``.csv`` (a header, then
            a task a line; every value is text), ``.parquet`` (a task a row), or a folder of a Hugging Face data set,
            as ``save_to_disk`` writes it or with Parquet or JSON Lines files in it. Parquet and such folders need
            pyarrow: the extra ``parquet``.
        columns: those of a task to read; empty: all.

    Raises:
        DataError: the file is missing, empty, of another kind, or most of its rows are malformed; the message has the
            line number. Or a folder holds several splits, no task has one of the columns, or a column holds what a task
            can't.
    """
    tasks = [task for name in _match(path) for task in _tasks(name, columns)]
    if not tasks:
        raise DataError(f"data file {path} is empty. It must hold at least one task.")
    there = {name for task in tasks for name in task}
    missing = [name for name in columns if name not in there]
    if missing:
        raise DataError(f"no task of {path} has a column {missing[0]!r}. Give columns that the tasks have.")
    return tasks


def task_files(path: Path) -> list[Path]:
    """Return the files that `load_tasks` reads.

    Raises:
        DataError: a folder contains no data set, or several splits.
    """
    return [file for name in _match(path) for file in _files(name)]


def _match(path: Path) -> list[Path]:
    """Return the path if it exists; otherwise what it matches as a pattern, or the path if it matches nothing."""
    found = [] if path.exists() else sorted(glob.glob(str(path), recursive=True))  # noqa: PTH207  # it may be absolute
    return [Path(name) for name in found] or [path]


def _files(path: Path) -> list[Path]:
    return _folder(path) if path.is_dir() else [path]


def _tasks(path: Path, columns: Sequence[str]) -> Iterator[Task]:
    for file in _files(path):
        faulty = FaultyRows(file)
        for row in faulty.readable(_rows(file, columns)):
            yield finite({name: row.value[name] for name in columns if name in row.value} if columns else row.value)
        faulty.finish()


def _rows(path: Path, columns: Sequence[str]) -> Iterator[DataRow]:
    readers: dict[str, Callable[[Path], Iterator[DataRow]]] = {
        ".jsonl": json_lines,
        ".ndjson": json_lines,
        ".json": json_list,
        ".csv": csv_rows,
        ".parquet": lambda path: arrow_rows(path, columns),
        ".arrow": lambda path: arrow_rows(path, columns),
    }
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise DataError(
            f"data file {path}: unknown kind {path.suffix!r}. Give a .jsonl, .json, .csv or .parquet file, or a"
            " folder of a Hugging Face data set."
        )
    if not path.exists():
        raise DataError(f"data file {path} does not exist. Check the path; it is relative to {Path.cwd()}.")
    return reader(path)


def check_storable(task: Task) -> None:
    """Reject a task that some stores cannot hold.

    Raises:
        ValueError: it has dates, NaN, integers beyond 64 bits, or halves of surrogate pairs.
    """
    try:
        orjson.dumps(task)
        json.dumps(task, allow_nan=False)  # Parquet has dates and NaN, which the other would write as text and null
    except TypeError as error:
        raise ValueError(str(error)) from None


def digest(tasks: Sequence[Task]) -> str:
    """Return 16 hex digits that change if any task does: a resumed run must continue with the same data."""
    found = hashlib.sha256()
    for number, task in enumerate(tasks):  # as `json.dumps` of the list writes it, without its text in memory
        found.update(f"{', ' if number else '['}{json.dumps(task, sort_keys=True)}".encode())
    found.update(b"]" if tasks else b"[]")
    return found.hexdigest()[:16]


def count_shared(tasks: Sequence[Task], val: Sequence[Task]) -> int:
    """Return how many held-out tasks are also training tasks."""
    held_out = [json.dumps(task, sort_keys=True) for task in val]
    wanted = frozenset(held_out)
    shared = {text for task in tasks if (text := json.dumps(task, sort_keys=True)) in wanted} if val else set[str]()
    return sum(text in shared for text in held_out)


def batch_at(step: int, task_count: int, batch_size: int, seed: int) -> list[int]:
    """Return the tasks of one step: a pure function of the step, so that a resumed run takes the same next batch.

    Every epoch goes through all tasks once, in its own order; a batch may span two epochs.

    Args:
        step: from 0.
        task_count: number of tasks, at least 1.
        batch_size: tasks in a step.
        seed: of the run.

    Returns:
        (batch_size,) indices of tasks.
    """
    places = range(step * batch_size, (step + 1) * batch_size)
    return [_order(place // task_count, task_count, seed)[place % task_count] for place in places]


@lru_cache(maxsize=2)  # a batch may span two epochs
def _order(epoch: int, task_count: int, seed: int) -> Sequence[int]:
    """Return the order of all tasks in one epoch."""
    order = array("q", range(task_count))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order


def _folder(path: Path) -> list[Path]:
    """Return a data set's files: those that `save_to_disk` wrote, otherwise its task files, by name."""
    if (path / "dataset_dict.json").is_file():
        raise _several(path, [str(path / one.name) for one in sorted(path.iterdir()) if one.is_dir()])
    if (path / _STATE).is_file():
        return _saved_files(path)
    for kind in ("*.arrow", "**/*.parquet", "*.jsonl"):
        if files := sorted(file for file in path.glob(kind) if not _CACHE.fullmatch(file.name)):
            _check_one_split(path, files)
            return files
    raise DataError(f"data folder {path} contains no data set: no .arrow, .parquet or .jsonl file is in it.")


def _saved_files(path: Path) -> list[Path]:
    """Name the files that `save_to_disk` wrote, without the caches of `map` and `shuffle` next to them."""
    try:
        return [path / file["filename"] for file in read_json((path / _STATE).read_bytes())["_data_files"]]
    except (KeyError, TypeError, ValueError):
        raise DataError(
            f"data folder {path}: {_STATE} names no _data_files. Save it again with save_to_disk."
        ) from None


def _check_one_split(path: Path, files: Sequence[Path]) -> None:
    """Reject files of several splits or configurations. Files of one are in one folder and differ in a number."""
    splits: dict[str, list[Path]] = {}
    for file in files:
        name = _NUMBER.sub("[0-9]*", _SHARD.sub("-*-of-*", glob.escape(file.stem)))
        splits.setdefault(f"{glob.escape(str(file.parent))}/{name}{file.suffix}", []).append(file)
    if len(splits) > 1:
        raise _several(path, [str(its[0]) if len(its) == 1 else pattern for pattern, its in splits.items()])


def _several(path: Path, splits: Sequence[str]) -> DataError:
    names = ", ".join(map(shlex.quote, splits))
    return DataError(
        f"data folder {path} holds several splits. Name one of them: {names}. A folder, a file or a pattern of files in"
        " quotes will do."
    )
