"""Task files: JSON Lines, a JSON list, CSV, Parquet, a Hugging Face data set's folder; and a run's order of them."""

from __future__ import annotations

import csv
import glob
import hashlib
import io
import json
import random
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn, TypeAlias

import orjson

from lightning_spans.errors import DataError

Task: TypeAlias = dict[str, Any]

_STATE: Final = "state.json"  # of `save_to_disk`
_CACHE: Final = re.compile(r"cache-.*\.arrow")
_SHARD: Final = re.compile(r"-\d+-of-\d+.*")
_NUMBER: Final = re.compile(r"\d+")


def load_tasks(path: Path) -> list[Task]:
    """Read all tasks of a file, or of all files that a pattern names; the name's ending tells the kind.

    Args:
        path: ``.jsonl`` or ``.ndjson`` (an object a line), ``.json`` (a list of objects), ``.csv`` (a header, then
            a task a line; every value is text), ``.parquet`` (a task a row), or a folder of a Hugging Face data set,
            as ``save_to_disk`` writes it or with Parquet or JSON Lines files in it. Parquet and such folders need
            pyarrow: the extra ``parquet``.

    Raises:
        DataError: the file is missing, empty, of another kind, or malformed; the message has the line number.
            Or a folder holds several splits.
    """
    found = [] if path.exists() else sorted(glob.glob(str(path), recursive=True))  # noqa: PTH207  # it may be absolute
    tasks = [task for name in found or [str(path)] for task in _tasks(Path(name))]
    if not tasks:
        raise DataError(f"data file {path} is empty. It must hold at least one task.")
    return tasks


def _tasks(path: Path) -> Iterator[Task]:
    readers: dict[str, Callable[[Path, str], Iterator[Task]]] = {
        ".jsonl": _json_lines,
        ".ndjson": _json_lines,
        ".json": _json_list,
        ".csv": _csv,
    }
    if path.is_dir():
        return _folder(path)
    if path.suffix.lower() == ".parquet" and path.is_file():
        return _arrow(path)
    reader = readers.get(path.suffix.lower())
    if reader is None and path.suffix.lower() != ".parquet":
        raise DataError(
            f"data file {path}: unknown kind {path.suffix!r}. Give a .jsonl, .json, .csv or .parquet file, or a"
            " folder of a Hugging Face data set."
        )
    return (reader or _json_lines)(path, _text(path))


def check_storable(task: Task) -> None:
    """Refuse a task that not every store holds.

    Raises:
        ValueError: it has dates, NaN, integers beyond 64 bits, or halves of surrogate pairs.
    """
    try:
        orjson.dumps(task)
        json.dumps(task, allow_nan=False)  # Parquet has dates and NaN, which the other would write as text and null
    except TypeError as error:
        raise ValueError(str(error)) from None


def digest(tasks: Sequence[Task]) -> str:
    """Return 16 hex digits that change when any task does: a resumed run must go on with the same data."""
    return hashlib.sha256(json.dumps(tasks, sort_keys=True).encode()).hexdigest()[:16]


def shared(tasks: Sequence[Task], val: Sequence[Task]) -> int:
    """Return how many held-out tasks are training tasks, too."""
    known = {json.dumps(task, sort_keys=True) for task in tasks} if val else set[str]()
    return sum(json.dumps(task, sort_keys=True) in known for task in val)


def batch_at(step: int, task_count: int, batch_size: int, seed: int) -> list[int]:
    """Return the tasks of one step: a pure function of the step, so that a resumed run takes the same next batch.

    Every epoch goes through all tasks once, in an order of its own; a batch may span two epochs.

    Args:
        step: from 0.
        task_count: number of tasks, at least 1.
        batch_size: tasks in a step.
        seed: of the run.

    Returns:
        (batch_size,) indices of tasks.
    """
    places = range(step * batch_size, (step + 1) * batch_size)
    orders: dict[int, list[int]] = {}
    for epoch in {place // task_count for place in places}:
        orders[epoch] = list(range(task_count))
        random.Random(f"{seed}/{epoch}").shuffle(orders[epoch])
    return [orders[place // task_count][place % task_count] for place in places]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise DataError(f"data file {path} does not exist. Check the path; it is relative to {Path.cwd()}.") from None
    except OSError as error:
        raise DataError(f"data file {path} can't be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise DataError(f"data file {path}, line {line}: not UTF-8 text. Save the file as UTF-8.") from None


def _json_lines(path: Path, text: str) -> Iterator[Task]:
    # Only "\n" ends a line: str.splitlines would also cut at U+2028, which JSON strings may hold.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield _task(path, _parse(path, line, number), f"line {number}")


def _json_list(path: Path, text: str) -> Iterator[Task]:
    if not text.strip():
        return
    value = _parse(path, text, 1)
    if not isinstance(value, list):
        raise DataError(f"data file {path}, line 1: a .json file must hold a list of objects, one a task.")
    for number, item in enumerate(value, 1):
        yield _task(path, item, f"item {number} of the list")


def _folder(path: Path) -> Iterator[Task]:
    """Read a data set's folder: the Arrow files of `save_to_disk`, else what files of tasks it holds, by name."""
    if (path / "dataset_dict.json").is_file():
        raise _several(path, [str(path / one.name) for one in sorted(path.iterdir()) if one.is_dir()])
    if (path / _STATE).is_file():
        for file in _saved(path):
            yield from _arrow(file)
        return
    for kind in ("*.arrow", "**/*.parquet", "*.jsonl"):
        if files := sorted(file for file in path.glob(kind) if not _CACHE.fullmatch(file.name)):
            _check_one_split(path, files)
            for file in files:
                yield from _json_lines(file, _text(file)) if kind == "*.jsonl" else _arrow(file)
            return
    raise DataError(f"data folder {path} holds no data set: no .arrow, .parquet or .jsonl file is in it.")


def _saved(path: Path) -> list[Path]:
    """Name the files that `save_to_disk` wrote: `map` and `shuffle` leave caches of theirs beside them."""
    state = _parse(path / _STATE, _text(path / _STATE), 1)
    try:
        return [path / file["filename"] for file in state["_data_files"]]
    except (KeyError, TypeError):
        raise DataError(
            f"data folder {path}: {_STATE} names no _data_files. Save it again with save_to_disk."
        ) from None


def _check_one_split(path: Path, files: Sequence[Path]) -> None:
    """Refuse files of several splits or configurations: those of one are in one folder and differ in a number."""
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


def _arrow(path: Path) -> Iterator[Task]:
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError:
        raise DataError(f"{path} needs pyarrow. Run: pip install pyarrow") from None
    try:
        if path.suffix == ".arrow":
            with pa.memory_map(str(path)) as source:
                rows = pa.ipc.open_stream(source).read_all().to_pylist()
        else:
            rows = parquet.read_table(path).to_pylist()
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(f"data file {path} can't be read: {str(error).rstrip('.')}.") from None
    for number, row in enumerate(rows, 1):
        yield _task(path, row, f"row {number}")


def _csv(path: Path, text: str) -> Iterator[Task]:
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    try:
        _check_header(path, reader.fieldnames or ())
        for row in reader:
            if None in row or None in row.values():
                columns = len(reader.fieldnames or ())
                raise DataError(f"data file {path}, line {reader.line_num}: not {columns} values, as the header has.")
            yield dict(row)
    except csv.Error as error:
        raise DataError(f"data file {path}, line {reader.reader.line_num}: not CSV: {error}.") from None


def _check_header(path: Path, names: Sequence[str]) -> None:
    """Refuse a header that would lose values, or that is separated by something else than commas."""
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise DataError(f"data file {path}, line 1: two columns are called {twice!r}. Rename one.")
    if len(names) == 1 and set(names[0]) & {";", "\t"}:
        raise DataError(f"data file {path}, line 1: one column, {names[0]!r}. Separate values by commas.")


def _parse(path: Path, text: str, first_line: int) -> Any:
    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is not a JSON value")

    try:
        return json.loads(text, parse_constant=refuse)
    except json.JSONDecodeError as error:
        line = first_line + error.lineno - 1
        lines = path.suffix.lower() == ".json" and error.msg == "Extra data"
        do = " One object a line is JSON Lines: name the file .jsonl." if lines else ""
        raise DataError(f"data file {path}, line {line}: not JSON: {error.msg} at column {error.colno}.{do}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"data file {path}, line {first_line}: not JSON: {error}.") from None


def _task(path: Path, value: Any, where: str) -> Task:
    if not isinstance(value, dict):
        do = " A list of tasks is a .json file." if isinstance(value, list) and path.suffix != ".json" else ""
        raise DataError(
            f'data file {path}, {where}: a task must be an object such as {{"question": ...}}, not'
            f" {str(value)[:60]!r}.{do}"
        )
    try:
        check_storable(value)
    except ValueError as error:
        raise DataError(f"data file {path}, {where}: this task can't be stored: {error}. Write it as text.") from None
    return value
