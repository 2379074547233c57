"""What a search has paid for, in the order in which it did: a search that was cut is gone through again from here.

GEPA's choices follow from its seed and from what it was told. So told the same again it comes to the very place where
it was cut, and nothing is run or asked twice.
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
        path: of the file. A last line that was cut is taken off.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._done = deque(read_lines(path))

    @property
    def waits(self) -> bool:
        """Is there something that was paid for, and not told again yet?"""
        return bool(self._done)

    def next(self, kind: str, asked: object) -> dict[str, Any] | None:
        """Return what this came to when it was done before; None where it was not.

        Raises:
            ConfigError: something else was done at this place.
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
        """Keep what something came to; it is on the disk when this returns."""
        add_line(self._path, {"kind": kind, "asked": digest_of(asked), "came_to": came_to})


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read a file of JSON lines, and take off a last line that was cut; empty where there is no file."""
    written = path.read_bytes() if path.exists() else b""
    whole = written[: written.rfind(b"\n") + 1]
    if whole != written:
        os.truncate(path, len(whole))
    return [json.loads(line) for line in whole.splitlines()]


def add_line(path: Path, line: Mapping[str, Any]) -> None:
    """Add a line to a file of JSON lines; it is on the disk when this returns."""
    with path.open("ab") as file:
        file.write(f"{json.dumps(line)}\n".encode())
        file.flush()
        os.fsync(file.fileno())


def digest_of(asked: object) -> str:
    """Return 16 hex digits that tell a request from others."""
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]
