"""A spool on disk: what could not be delivered waits here, also for the next process."""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from lightning_spans.spans import Span, from_json, to_json

logger = logging.getLogger("lightning_spans")

MAX_BYTES: Final = 1 << 30
STALE_S: Final = 600.0  # a claim this old belongs to a process that died while delivering


class Spool:
    """A folder of batches, one file each, in the order they were spooled.

    A file is written whole under another name and then renamed, so that a reader never sees half of it. It is claimed
    by renaming, so that two processes never deliver the same file. Delivery is idempotent, so a crash after
    delivering and before removing costs nothing.

    Args:
        folder: made when first needed, for its owner only: files hold what the agent saw, and attempt keys.
        max_bytes: most bytes to keep; what comes on top is not kept.
    """

    def __init__(self, folder: Path, *, max_bytes: int = MAX_BYTES) -> None:
        self.folder = folder.absolute()
        self._max_bytes = max_bytes
        self._bytes: int | None = None

    def append(self, url: str | None, key: str | None, spans: Sequence[Span]) -> int:
        """Keep a batch. Gives the number of spans kept: all, or 0 when the spool is full or the disk refuses."""
        import orjson

        body = orjson.dumps({"url": url, "key": key, "spans": [to_json(span) for span in spans]}, default=str)
        try:
            if self._size() + len(body) > self._max_bytes:
                logger.error("lightning: the spool %s is full (%d bytes)", self.folder, self._max_bytes)
                return 0
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            name = f"{time.time_ns():020d}-{uuid.uuid4().hex[:8]}"
            half = self.folder / f"{name}.half"
            with os.fdopen(os.open(half, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(body)
                file.flush()
                os.fsync(file.fileno())
            half.rename(self.folder / f"{name}.spans")
        except OSError:
            logger.exception("lightning: can't spool to %s", self.folder)
            return 0
        self._bytes = self._size() + len(body)
        return len(spans)

    def pending(self) -> int:
        """Give the number of batches that wait."""
        return len(self._waiting())

    def describe(self) -> str:
        """Say in words what waits where."""
        count = self.pending()
        return f"{count} batches wait in {self.folder}" if count else "nothing waits in the spool"

    def replay(self, send: Callable[[str | None, str | None, Sequence[Span]], bool]) -> int:
        """Deliver waiting batches, oldest first, until one fails. Gives the number of batches delivered.

        Args:
            send: takes URL, key and spans; True when the batch needs no further delivery.
        """
        import orjson

        count = 0
        for path in self._waiting():
            claimed = path.with_suffix(f".{os.getpid()}")
            try:
                path.rename(claimed)
            except FileNotFoundError:
                continue  # another process delivers it
            os.utime(claimed)
            try:
                batch = orjson.loads(claimed.read_bytes())
                spans = [from_json(span) for span in batch["spans"]]
            except (ValueError, KeyError):
                broken = claimed.with_suffix(".broken")
                logger.exception("lightning: %s can't be read and is kept as %s", path, broken)
                claimed.rename(broken)
                continue
            if not send(batch["url"], batch["key"], spans):
                claimed.rename(path)
                break
            claimed.unlink()
            self._bytes = None
            count += 1
        return count

    def _waiting(self) -> list[Path]:
        if not self.folder.is_dir():
            return []
        now = time.time()
        for path in self.folder.iterdir():
            if path.suffix[1:].isdigit() and now - path.stat().st_mtime > STALE_S:
                path.rename(path.with_suffix(".spans"))
        return sorted(self.folder.glob("*.spans"))

    def _size(self) -> int:
        if self._bytes is None:
            self._bytes = sum(path.stat().st_size for path in self.folder.glob("*")) if self.folder.is_dir() else 0
        return self._bytes
