"""The journal: ended spans that are not delivered yet, on disk before the call returns to the agent.

A process may end without notice: `os._exit`, a signal, a cluster that stops its workers. The spool's next reader finds
the journal of an ended process and delivers it. It is not synchronised to disk: it survives the process, not the
machine.
"""

from __future__ import annotations

import errno
import logging
import os
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from lightning_spans.record.delivery.deliver import Destination
from lightning_spans.record.delivery.outbox import JOURNAL, Spool, hold, mine
from lightning_spans.record.process import in_child
from lightning_spans.schema.spans import Span

logger = logging.getLogger("lightning_spans")

LONG: Final = 4 << 20  # bytes after which a new journal replaces one whose spans are all taken


class Journal:
    """One process's journal in the folder of its spool. A lock shows that the process is running, and ends with it.

    Args:
        spool: provides the folder.
    """

    def __init__(self, spool: Spool) -> None:
        self._spool = spool
        self._file: int | None = None
        self._begin()
        in_child(self._begin)

    def _begin(self) -> None:
        """Start without a file: in a forked child the open file is the parent's."""
        if self._file is not None:
            os.close(self._file)
        self._file = None
        self._path = Path()
        self._length = 0
        self._replaced: list[tuple[int, Path]] = []
        self._told = False

    def write(self, destinations: Sequence[Destination], span: Span) -> None:
        """Write a span once per destination."""
        lines = b"".join(self._spool.body(to.url, to.written_key, [span]) + b"\n" for to in destinations)
        try:
            file = self._open() if self._file is None else self._file
            if os.write(file, lines) < len(lines):
                os.ftruncate(file, self._length)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._length += len(lines)
        except OSError as error:
            if not self._told:
                self._told = True
                logger.warning("lightning: no journal in %s, so a crash may cost spans: %s", self._spool.folder, error)

    def _open(self) -> int:
        self._spool.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path = self._spool.folder / f"{uuid.uuid4().hex}{JOURNAL}"
        mine.add(self._path)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | getattr(os, "O_CLOEXEC", 0)
        self._file, self._length = os.open(self._path, flags, 0o600), 0
        hold(self._file)
        return self._file

    def replace_if_long(self) -> None:
        """Start a new file if the current one is long and all its spans are being delivered."""
        if self._file is not None and self._length > LONG:
            self._replaced.append((self._file, self._path))
            self._file = None

    def settle(self, *, all_of_them: bool) -> None:
        """Drop the spans of replaced files, which are delivered or spooled; or all spans."""
        while self._replaced:
            _remove(*self._replaced.pop())
        if all_of_them and self._file is not None and self._length:
            os.ftruncate(self._file, 0)
            self._length = 0

    def close(self) -> None:
        """Drop all spans and remove the file, and the folder if it is then empty."""
        self.settle(all_of_them=True)
        if self._file is not None:
            _remove(self._file, self._path)
            self._file = None
        self._spool.remove_if_empty()


def _remove(file: int, path: Path) -> None:
    os.close(file)
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("lightning: the journal %s is delivered and can't be removed: %s", path, error)
    mine.discard(path)
