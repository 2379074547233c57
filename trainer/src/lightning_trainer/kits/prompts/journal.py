"""The journal of a search: everything that it has paid for, in order, so that an interrupted search can be replayed.

GEPA's choices depend on its seed and on the results that it gets. With the same results it arrives at the exact point
of the interruption, and nothing is run or requested twice.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from lightning_spans.errors import ConfigError

FILE: Final = "journal.jsonl"


class SearchJournal:
    """A file of JSON lines, one for each batch of rollouts and for each proposal.

    Args:
        path: of the file. A truncated last line is removed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._done = deque(read_lines(path))

    @property
    def waits(self) -> bool:
        """Whether something that was paid for has not been replayed yet."""
        return bool(self._done)

    def next(self, kind: str, asked: object) -> dict[str, Any] | None:
        """Return the recorded result of this request; None if nothing is left to replay.

        Raises:
            ConfigError: the next record is of another request.
        """
        if not self._done:
            return None
        line = self._done.popleft()
        if (line["kind"], line["asked"]) != (kind, digest_of(asked)):
            raise ConfigError(
                f"{self._path} belongs to a search with different calls, because it used another version of gepa or of"
                " this program. Start a new search with another --out."
            )
        came_to: dict[str, Any] = line["came_to"]
        return came_to

    def add(self, kind: str, asked: object, came_to: dict[str, Any]) -> None:
        """Record the result of a request; it is on disk when this returns."""
        add_line(self._path, {"kind": kind, "asked": digest_of(asked), "came_to": came_to})


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read a file of JSON lines, and remove a truncated last line; empty if there is no file."""
    written = path.read_bytes() if path.exists() else b""
    whole = written[: written.rfind(b"\n") + 1]
    if whole != written:
        os.truncate(path, len(whole))
    return [json.loads(line) for line in whole.splitlines()]


def add_line(path: Path, line: Mapping[str, Any]) -> None:
    """Append a line to a file of JSON lines; it is on disk when this returns."""
    with path.open("ab") as file:
        file.write(f"{json.dumps(line)}\n".encode())
        file.flush()
        os.fsync(file.fileno())


def digest_of(asked: object) -> str:
    """Return 16 hex digits that identify a request."""
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]
