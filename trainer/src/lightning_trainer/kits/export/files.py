"""Lines on disk: candidates while a store is read, and files that are whole or not there."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from glob import escape
from pathlib import Path
from types import TracebackType
from typing import Any

from lightning_spans.errors import ConfigError
from lightning_spans.schema.json import dumps, loads

if sys.platform != "win32":
    import fcntl

Line = dict[str, Any]


class LineSpool:
    """Lines that may be written later, kept on disk: a store may hold more than memory does."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed by __exit__

    def __enter__(self) -> LineSpool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def add(self, line: Line) -> int:
        """Keep a line; gives its place."""
        place = self._file.seek(0, os.SEEK_END)
        self._file.write(dumps(line) + b"\n")
        return place

    def get(self, place: int) -> Line:
        """Return a line."""
        self._file.seek(place)
        line: Line = loads(self._file.readline().rstrip(b"\n"))
        return line


class Draft:
    """A file that takes its name when it is whole; until then, what had the name stays.

    Raises:
        ConfigError: it can't be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._part = path.with_name(f".{path.name}.{os.getpid()}.part")
        self.lines = 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._sweep()
            self._file = self._part.open("wb")
            if sys.platform != "win32":
                fcntl.flock(self._file, fcntl.LOCK_EX)
        except OSError as error:
            raise ConfigError(f"{path} can't be written: {error.strerror}.") from None

    def write(self, lines: Iterable[Line]) -> None:
        """Write lines, as JSON that any reader takes."""
        try:
            for line in lines:
                self._file.write(dumps(line).lstrip() + b"\n")
                self.lines += 1
        except OSError as error:
            raise ConfigError(f"{self.path} can't be written: {error.strerror}. Is the disk full?") from None

    def end(self) -> None:
        """See that all of it is on the disk; it has no name yet."""
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        except OSError as error:
            raise ConfigError(f"{self.path} can't be written: {error.strerror}. Is the disk full?") from None

    def name(self) -> None:
        """Give the file its name, once all files that belong together are on the disk."""
        try:
            self._part.replace(self.path)
        except OSError as error:
            raise ConfigError(f"{self.path} can't be written: {error.strerror}.") from None

    def _sweep(self) -> None:
        """Delete what killed processes left of this file: whoever writes one holds its lock."""
        if sys.platform == "win32":
            return
        for left in self.path.parent.glob(f".{escape(self.path.name)}.*.part"):
            with suppress(BlockingIOError, FileNotFoundError), left.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                left.unlink()

    def close(self) -> None:
        """Leave nothing behind, unless it was finished."""
        with suppress(OSError):
            self._file.close()
        self._part.unlink(missing_ok=True)
