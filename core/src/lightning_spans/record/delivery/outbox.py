"""A spool on disk: what could not be delivered waits here, also for the next process."""

from __future__ import annotations

import errno
import hashlib
import logging
import math
import os
import sys
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeAlias

from lightning_spans.record.process import in_child
from lightning_spans.schema.json import dumps, from_json, loads, to_json
from lightning_spans.schema.spans import Json, Span

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

logger = logging.getLogger("lightning_spans")

MAX_BYTES: Final = 1 << 30
STALE_S: Final = 600.0  # a half-written batch of this age belongs to a process that died while writing
OWN_KEY: Final = "$own"
"""Written instead of the key of the process's own server: the next process has its own."""
JOURNAL: Final = ".journal"  # suffix of a file that a running process writes to
_WAITING: Final = (".spans", ".half")  # a batch, and one whose writing process may have ended before it renamed it
_TELL_EVERY_S: Final = 60.0
_COUNT_EVERY_S: Final = 60.0
_RECOUNT_S: Final = 1.0  # the same before a batch is refused: others may have delivered theirs
_BATCH_SIZE: Final = 512
mine: Final[set[Path]] = set()  # journals of this process: opening one again here would lose its lock
_in_this_process: defaultdict[Path, threading.Lock] = defaultdict(threading.Lock)


def _after_fork() -> None:
    _in_this_process.clear()  # the threads that held them do not exist in the child
    mine.clear()  # the parent's, and locked by it


in_child(_after_fork)


def line_of(url: str | None, key: str | None) -> str:
    """Name the queue for a destination's batches. A destination that cannot be reached delays no other.

    Batches without their own key have a queue of their own, because not every process has a key for them.
    """
    named = f"{OWN_KEY} {url}" if key == OWN_KEY else url or ""
    return hashlib.sha256(named.encode()).hexdigest()[:8]


class Spool:
    """A folder of batches, one file each, named by number and queue, and delivered in the order of their numbers.

    A file is written completely under another name and then renamed, so that readers never see a partial file. One
    process at a time delivers from a folder, under a lock that the system releases if the process dies; a file is
    removed once it is delivered. Delivery is idempotent, so a crash in between does no harm.

    Args:
        folder: created when first needed, accessible only to its owner: files contain what the agent saw, and attempt
            keys.
        max_bytes: most bytes to keep; anything beyond is not kept. What other processes write and deliver is counted
            once a minute.
    """

    def __init__(self, folder: Path, *, max_bytes: int = MAX_BYTES) -> None:
        self.folder = folder.absolute()
        self._max_bytes = max_bytes
        self._last = 0
        self._told_at = -_TELL_EVERY_S
        self._bytes = 0
        self._counted_at = -math.inf

    def append(self, url: str | None, key: str | None, spans: Sequence[Span]) -> int:
        """Add a batch. Returns the number of spans kept: all, or 0 if the spool is full or the disk fails."""
        body = self.body(url, key, spans)
        half = None
        try:
            room = self._max_bytes - len(body)
            if self._size() > room and self._size(within_s=_RECOUNT_S) > room:
                self.tell(f"the spool {self.folder} is full ({self._max_bytes} bytes)")
                return 0
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            half = self.folder / f"{self._next():020d}-{line_of(url, key)}-{uuid.uuid4().hex[:8]}.half"
            _write(half, body)
            half.rename(half.with_suffix(".spans"))
            self._bytes += len(body)
            _sync(self.folder)
        except OSError as error:
            self.tell(f"can't spool to {self.folder}: {error}")
            if half is not None:
                with suppress(OSError):  # the disk failed to write; the remaining file is removed when it is old
                    half.unlink(missing_ok=True)
            return 0
        return len(spans)

    def body(self, url: str | None, key: str | None, spans: Sequence[Span]) -> bytes:
        """Return a batch as JSON.

        Of an attribute that is not JSON only the type is written, because its text would not be masked.
        """
        batch = {"url": url, "key": key, "spans": [to_json(span) for span in spans]}
        try:
            return dumps(batch)
        except (ValueError, RecursionError) as error:
            self.tell(f"a span can't be spooled whole: {error}")
        known = (replace(span, attributes={k: _json_or_type(v) for k, v in span.attributes.items()}) for span in spans)
        return dumps(batch | {"spans": [to_json(span) for span in known]})

    def pending(self) -> int:
        """Return the number of waiting batches."""
        return len(self._list_waiting())

    def waits(self, url: str | None, key: str | None) -> bool:
        """Whether a batch for this destination is waiting, so that a newer one must wait too."""
        line = line_of(url, key)
        return any(name.endswith(".spans") and _line(name) in (line, None) for name in self._names())

    def describe(self) -> str:
        """Describe what is waiting for which destination."""
        count = self.pending()
        return f"{count} batches wait in {self.folder}" if count else "nothing waits in the spool"

    def replay(
        self,
        send: Callable[[str | None, str | None, Sequence[Span]], bool],
        *,
        ready: Callable[[str], bool] = lambda _: True,
        first: str | None = None,
        interrupt: Callable[[], bool] = lambda: False,
    ) -> int:
        """Deliver waiting batches, each queue oldest first until one fails. Returns the number of batches delivered.

        Does nothing while another process delivers.

        Args:
            send: takes URL, key and spans; returns True if the batch needs no further delivery.
            ready: whether a queue, as named by `line_of`, is worth a try.
            first: the queue served before all others, which may be slow to fail.
            interrupt: whether to leave the rest for the next time; called after each batch.
        """
        if not any(name.endswith(_WAITING) for name in self._names()) and not self.journals():
            return 0
        with self._alone() as alone:
            if not alone:
                return 0
            for journal in self.journals():
                self._adopt(journal)
            return self._deliver(send, ready, first, interrupt)

    def journals(self) -> list[Path]:
        """Return the journals of other processes, some of which may be running."""
        journals = (self.folder / name for name in self._names() if name.endswith(JOURNAL))
        return sorted(path for path in journals if path not in mine)

    def _adopt(self, journal: Path) -> None:
        """Spool what an ended process recorded but did not deliver."""
        with suppress(OSError):  # it has been removed, or its process belongs to another user
            if not journal.stat().st_size and time.time() - journal.stat().st_mtime < STALE_S:
                return  # it may be new, and not locked yet
            file = os.open(journal, os.O_RDWR | getattr(os, "O_CLOEXEC", 0))
            try:
                if not hold(file):
                    return  # its process is running
                batches, unreadable = _read_journal(journal.read_bytes())
                if not all(self.append(*batch) for batch in batches):
                    return
                if unreadable:
                    self.tell(f"{unreadable} spans of {journal} can't be read; it is kept as a .broken file")
                    journal.rename(journal.with_suffix(".broken"))
                else:
                    journal.unlink()
            finally:
                os.close(file)

    def remove_if_empty(self) -> None:
        """Remove the folder if nothing ever waited in it."""
        with suppress(OSError):
            self.folder.rmdir()

    def _deliver(
        self,
        send: Callable[[str | None, str | None, Sequence[Span]], bool],
        ready: Callable[[str], bool],
        first: str | None,
        interrupt: Callable[[], bool],
    ) -> int:
        count = 0
        stuck: set[str] = set()
        for path in sorted(self._list_waiting(), key=lambda path: _line(path.name) != first):
            named = _line(path.name)
            if named is not None and (named in stuck or not ready(named)):
                continue
            batch = _read(path)
            if batch is None:
                continue
            url, key, spans = batch
            line = line_of(url, key)
            if line not in stuck and send(url, key, spans):
                size = path.stat().st_size
                path.unlink()
                self._bytes -= size
                count += 1
            else:
                stuck.add(line)
            if interrupt():
                break
        return count

    @contextmanager
    def _alone(self) -> Iterator[bool]:
        """Hold the folder's lock; yields False if another process has it."""
        mine = _in_this_process[self.folder]
        if not mine.acquire(blocking=False):
            yield False
            return
        try:
            file = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o600)
            try:
                yield hold(file)  # closing the file unlocks it
            finally:
                os.close(file)
        finally:
            mine.release()

    def _names(self) -> list[str]:
        """List the folder, in no order and without paths: it may hold very many files, and is looked at often."""
        try:
            with os.scandir(self.folder) as entries:
                return [entry.name for entry in entries]
        except (FileNotFoundError, NotADirectoryError):
            return []

    def _list_waiting(self) -> list[Path]:
        found = [self.folder / name for name in sorted(self._names()) if name.endswith(_WAITING)]
        for path in found:
            if path.suffix == ".half":
                with suppress(OSError):  # another process has finished or removed it
                    if time.time() - path.stat().st_mtime > STALE_S:
                        path.unlink()
        return [path for path in found if path.suffix == ".spans"]

    def _next(self) -> int:
        """Return a number above all existing ones, even if the clock was set back."""
        if not self._last:
            self._last = max((int(number) for path in self._list_waiting() if (number := _number(path))), default=0)
        self._last = max(time.time_ns(), self._last + 1)
        return self._last

    def _size(self, within_s: float = _COUNT_EVERY_S) -> int:
        """Return the bytes in the folder, by a count that is at most so many seconds old and what this process did."""
        if time.monotonic() - self._counted_at >= within_s:
            self._bytes = sum(self._sizes())
            self._counted_at = time.monotonic()
        return self._bytes

    def _sizes(self) -> Iterator[int]:
        with suppress(FileNotFoundError), os.scandir(self.folder) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):  # it has been delivered
                    yield entry.stat().st_size

    def tell(self, what: str) -> None:
        """Log a failure, once a minute."""
        if time.monotonic() - self._told_at >= _TELL_EVERY_S:
            self._told_at = time.monotonic()
            logger.error("lightning: %s", what)


def _json_or_type(value: Json) -> Json:
    try:
        dumps(value)
    except (ValueError, RecursionError):
        return f"<{type(value).__qualname__}>"
    return value


def _number(path: Path) -> str:
    number = path.name.split("-")[0]
    return number if number.isdigit() else ""


def _line(name: str) -> str | None:
    """Read the queue from a file's name; None if the name does not contain it."""
    parts = name.partition(".")[0].split("-")
    return parts[1] if len(parts) == 3 else None


def _write(path: Path, body: bytes) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(body)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Synchronise the folder's list of files to disk, if the system supports it."""
    if sys.platform != "win32":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def hold(file: int) -> bool:
    """Lock an open file for this process as long as it is open; False if another process has locked it.

    Raises:
        OSError: the file system does not support locks, as some network file systems do not.
    """
    try:
        if sys.platform == "win32":
            msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
        else:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # belongs to this process: a forked child does not have it
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES, errno.EDEADLK):
            return False
        why = f"{error.strerror}: its file system has no locks. Set LIGHTNING_SPOOL to a folder on a local disk"
        raise OSError(error.errno, why) from error
    return True


Batch: TypeAlias = tuple[str | None, str | None, list[Span]]


def _read_journal(body: bytes) -> tuple[list[Batch], int]:
    """Read a journal as batches, and count unreadable lines. A partial last line does not count."""
    batches: list[Batch] = []
    unreadable = 0
    for line in body.split(b"\n")[:-1]:
        try:
            url, key, spans = _batch(line)
        except (ValueError, KeyError, TypeError, RecursionError):
            unreadable += 1
            continue
        if not batches or batches[-1][:2] != (url, key) or len(batches[-1][2]) >= _BATCH_SIZE:
            batches.append((url, key, []))
        batches[-1][2].extend(spans)
    return batches, unreadable


def _batch(body: bytes) -> Batch:
    batch: Any = loads(body)
    return batch["url"], batch["key"], [from_json(Span, span) for span in batch["spans"]]


def _read(path: Path) -> Batch | None:
    try:
        return _batch(path.read_bytes())
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, RecursionError):
        broken = path.with_suffix(".broken")
        logger.exception("lightning: %s can't be read and is kept as %s", path, broken)
        path.rename(broken)
        return None


def default_spool() -> Path:
    """Folder for undelivered spans: ``LIGHTNING_SPOOL``, otherwise ``./lightning-spool``; created when first needed."""
    return Path(os.environ.get("LIGHTNING_SPOOL", "lightning-spool"))
