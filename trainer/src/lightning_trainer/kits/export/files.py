"""Lines on disk: candidates while a store is read, and files that are complete or absent."""

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
    """Candidate lines on disk, because a store may be larger than memory."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed by __exit__

    def __enter__(self) -> LineSpool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def add(self, line: Line) -> int:
        """Add a line. Returns its place."""
        place = self._file.seek(0, os.SEEK_END)
        self._file.write(dumps(line) + b"\n")
        return place

    def get(self, place: int) -> Line:
        """Return the line at a place."""
        self._file.seek(place)
        line: Line = loads(self._file.readline().rstrip(b"\n"))
        return line


class Draft:
    """A file that gets its name when it is complete; until then, an existing file of that name stays.

    Raises:
        ConfigError: it cannot be written.
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
        """Write lines as JSON that any reader accepts."""
        try:
            for line in lines:
                self._file.write(dumps(line).lstrip() + b"\n")
                self.lines += 1
        except OSError as error:
            raise ConfigError(f"{self.path} can't be written: {error.strerror}. Is the disk full?") from None

    def end(self) -> None:
        """Flush the file to disk, still without its name."""
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        except OSError as error:
            raise ConfigError(f"{self.path} can't be written: {error.strerror}. Is the disk full?") from None

    def name(self) -> None:
        """Give the file its name, once all related files are on disk."""
        try:
            self._part.replace(self.path)
        except OSError as error:
            raise ConfigError(f"{self.path} can't be written: {error.strerror}.") from None

    def _sweep(self) -> None:
        """Delete the partial files of killed processes: a process that still writes one holds its lock."""
        if sys.platform == "win32":
            return
        for left in self.path.parent.glob(f".{escape(self.path.name)}.*.part"):
            with suppress(BlockingIOError, FileNotFoundError), left.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                left.unlink()

    def close(self) -> None:
        """Close the file, and delete it if it has no name yet."""
        with suppress(OSError):
            self._file.close()
        self._part.unlink(missing_ok=True)
