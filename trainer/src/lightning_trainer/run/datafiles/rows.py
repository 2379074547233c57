"""Rows of JSON Lines, JSON lists and CSV, and the handling of unreadable rows."""

from __future__ import annotations

import csv
import io
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from lightning_spans.errors import DataError
from lightning_spans.schema.json import read_json

logger = logging.getLogger(__name__)
_LONGEST: Final = 2**31 - 1  # a limit of the csv module, on Windows
_SHOWN: Final = 3  # rows that a warning names
_warned: set[str] = set()  # a command may read a file more than once


@dataclass(frozen=True, slots=True)
class DataRow:
    """One row of a data file.

    Attributes:
        where: its line, item or row.
        value: its content; None if it cannot be read.
        fault: why it cannot be read.
    """

    where: str
    value: Any = None
    fault: str | None = None


class FaultyRows:
    """Counts the rows of a file that are left out. If most rows are invalid, the file is of another kind.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._shown, self._bad, self._good = path, list[str](), 0, 0

    def readable(self, rows: Iterator[DataRow]) -> Iterator[DataRow]:
        """Yield the readable rows. Call `finish` after the last."""
        for row in rows:
            if row.fault is None:
                self._good += 1
                yield row
            else:
                self.add(row.where, row.fault)

    def reject(self, row: DataRow, why: str) -> None:
        """Count a row that was readable as one that is left out."""
        self._good -= 1
        self.add(row.where, why)

    def add(self, where: str, why: str) -> None:
        """Count a row that is left out."""
        self._bad += 1
        if len(self._shown) < _SHOWN:
            self._shown.append(f"{where}: {why.rstrip('.')}.")

    def finish(self) -> None:
        """Warn about the rows that were left out, once per file.

        Raises:
            DataError: more rows are unreadable than readable.
        """
        if self._bad > self._good:
            count = f" {self._bad} of {self._bad + self._good} rows can't be read." if self._bad > 1 else ""
            raise DataError(f"data file {self._path}, {self._shown[0]}{count}")
        if not self._bad:
            return
        more = " ..." if self._bad > len(self._shown) else ""
        told = f"{self._bad} of {self._bad + self._good} rows are left out. {' '.join(self._shown)}{more}"
        warning = f"WARNING: data file {self._path}: {told}"
        if warning not in _warned:
            _warned.add(warning)
            logger.warning("%s", warning)


def finite(value: Any) -> Any:
    """Return a value in which NaN and the infinities, which JSON lacks, are None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: finite(each) for name, each in value.items()}
    return [finite(each) for each in value] if isinstance(value, list) else value


def json_lines(path: Path) -> Iterator[DataRow]:
    """Read one object per line. Only a line feed ends a line: JSON strings may contain U+2028."""
    for number, line in enumerate(_bytes(path).split(b"\n"), 1):
        if line.strip(b" \t\r\n\xef\xbb\xbf"):
            try:
                yield _object(path, read_json(line), f"line {number}")
            except UnicodeDecodeError:
                yield DataRow(f"line {number}", fault="not UTF-8 text. Save the file as UTF-8")
            except ValueError as error:
                yield DataRow(f"line {number}", fault=f"not JSON: {error}")


def json_list(path: Path) -> Iterator[DataRow]:
    """Read a list of objects.

    Raises:
        DataError: the file contains something else.
    """
    content = _bytes(path)
    if not content.strip():
        return
    try:
        value = read_json(content)
    except UnicodeDecodeError as error:
        raise DataError(f"data file {path}, line {_line(content, error.start)}: not UTF-8 text.") from None
    except ValueError as error:
        place, message = getattr(error, "pos", 0), getattr(error, "msg", str(error))
        do = " One object a line is JSON Lines: name the file .jsonl." if message == "Extra data" else ""
        line = content.decode(errors="replace").count("\n", 0, place) + 1
        raise DataError(f"data file {path}, line {line}: not JSON: {error}.{do}") from None
    if not isinstance(value, list):
        raise DataError(f"data file {path}, line 1: a .json file must hold a list of objects.")
    for number, item in enumerate(value, 1):
        yield _object(path, item, f"item {number} of the list")


def csv_rows(path: Path) -> Iterator[DataRow]:
    """Read a table with a header; every value is text.

    Raises:
        DataError: it is not CSV, or its header is unusable.
    """
    content = _bytes(path)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"data file {path}, line {_line(content, error.start)}: not UTF-8 text. Save the file as UTF-8."
        ) from None
    csv.field_size_limit(max(csv.field_size_limit(), min(len(text), _LONGEST)))  # one field may be the whole file
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    try:
        names = reader.fieldnames or ()
        _check_header(path, names)
        for row in reader:
            if None in row or None in row.values():
                yield DataRow(f"line {reader.line_num}", fault=f"not {len(names)} values, as the header has")
            else:
                yield DataRow(f"line {reader.line_num}", dict(row))
    except csv.Error as error:
        raise DataError(f"data file {path}, line {reader.reader.line_num}: not CSV: {error}.") from None


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise DataError(f"data file {path} does not exist. Check the path; it is relative to {Path.cwd()}.") from None
    except OSError as error:
        raise DataError(f"data file {path} can't be read: {error.strerror}.") from None


def _line(content: bytes, place: int) -> int:
    return content.count(b"\n", 0, place) + 1


def _object(path: Path, value: Any, where: str) -> DataRow:
    if isinstance(value, dict):
        return DataRow(where, value)
    do = " A list of rows is a .json file." if isinstance(value, list) and path.suffix != ".json" else ""
    return DataRow(where, fault=f'a row must be an object such as {{"question": ...}}, not {str(value)[:60]!r}.{do}')


def _check_header(path: Path, names: Sequence[str]) -> None:
    """Reject a header that would lose values, or that is not separated by commas."""
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise DataError(f"data file {path}, line 1: two columns are called {twice!r}. Rename one.")
    if len(names) == 1 and set(names[0]) & {";", "\t"}:
        raise DataError(f"data file {path}, line 1: one column, {names[0]!r}. Separate values by commas.")
