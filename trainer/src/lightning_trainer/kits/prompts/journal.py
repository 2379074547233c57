"""What a search has paid for, in the order in which it did: a search that was cut is gone through again from here.

GEPA's choices follow from its seed and from what it was told. So told the same again it comes to the very place where
it was cut, and nothing is run or asked twice.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import deque
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
        written = path.read_bytes() if path.exists() else b""
        whole = written[: written.rfind(b"\n") + 1]
        if whole != written:
            os.truncate(path, len(whole))
        self._done: deque[dict[str, Any]] = deque(json.loads(line) for line in whole.splitlines())

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
        if (line["kind"], line["asked"]) != (kind, _digest(asked)):
            raise ConfigError(
                f"{self._path} belongs to a search with different calls, because it used another version of gepa or of"
                " this program. Start a new search with another --out."
            )
        came_to: dict[str, Any] = line["came_to"]
        return came_to

    def add(self, kind: str, asked: object, came_to: dict[str, Any]) -> None:
        """Keep what something came to; it is on the disk when this returns."""
        line = json.dumps({"kind": kind, "asked": _digest(asked), "came_to": came_to})
        with self._path.open("ab") as file:
            file.write(f"{line}\n".encode())
            file.flush()
            os.fsync(file.fileno())


def _digest(asked: object) -> str:
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]
