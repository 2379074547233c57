"""SQLite: how a file is opened, and how its writers take turns."""

from __future__ import annotations

import errno
import logging
import os
import random
import sqlite3
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event

from lightning_spans.errors import StoreError, StoreGoneError
from lightning_spans.store.sql.database import Database

if sys.platform != "win32":
    import fcntl

logger = logging.getLogger("lightning_spans")

_WRITER = "lightning_writer"
_BUSY_S = 30.0  # how long a writer waits for another process's transaction
_TURN_S = 1.0  # longest wait of a writer for its turn; turns take milliseconds
_PATIENT = f"PRAGMA busy_timeout={int(_BUSY_S * 1000)}"
_PRAGMAS = (
    _PATIENT,
    "PRAGMA synchronous=FULL",  # in WAL mode, NORMAL would lose acknowledged transactions in a power failure
    "PRAGMA wal_autocheckpoint=4000",
    "PRAGMA cache_size=-16000",
    "PRAGMA secure_delete=ON",  # deleted data is overwritten, not only unlinked
)
_CHECKPOINT_MS = 100
_EMPTIED_S = 10.0  # how long to wait for readers that still need what a deletion left in the log


def open_database(url: URL, *, create: bool) -> Database:
    """Open a file so that a committed transaction is on disk.

    Args:
        url: ``sqlite:///path``.
        create: create the file if it does not exist.

    Raises:
        StoreError: no file is named, it is missing, or its folder is.
    """
    path = _path(url, create=create)
    turnstile = Turnstile(path)
    opened = _identity(path)
    engine = create_engine(url, pool_size=8, max_overflow=-1, connect_args={"timeout": _BUSY_S})
    event.listen(engine, "connect", _on_connect)
    event.listen(engine, "begin", _begin(turnstile, lambda: _check(path, opened)))

    def close() -> None:
        engine.dispose()
        turnstile.close()

    return Database(
        engine=engine,
        close=close,
        writer=lambda: engine.connect().execution_options(**{_WRITER: True}),
        lock=lambda _: None,  # a writer's transaction excludes all others
        elapsing_ns=lambda _: time.monotonic_ns(),  # the machine's own, the same in all its processes; it never jumps
        after_delete=lambda: _empty_log(engine, path),
        compact=lambda: _rewrite(engine, path),
        error=sqlite3.Error,
        transient=lambda _: False,  # others are awaited while a transaction begins
        name=path.name,
        advice="Is it the file of a store? Are the file and its folder writable? Its disk may also be full.",
    )


def _path(url: URL, *, create: bool) -> Path:
    if url.database in (None, "", ":memory:") or "mode=memory" in str(url):
        raise StoreError("the store needs a file, because its records must outlive the process. Use sqlite:///path.db.")
    path = Path(os.path.abspath(str(url.database)))  # noqa: PTH100 - the file that SQLAlchemy opens
    if not path.parent.is_dir():
        raise StoreError(f"store {path}: the folder {path.parent} does not exist. Create it first.")
    if not create and not path.exists():
        raise StoreError(f"there is no store at {path}. Is the path right?")
    _make(path)
    return path


def _make(path: Path) -> None:
    """Create a new file accessible only to its owner, because it holds what agents saw. An existing one keeps its mode.

    SQLite gives the files that it creates next to it the same mode.
    """
    with suppress(OSError):  # it exists, or cannot be created, which SQLite reports better
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))


def _on_connect(connection: Any, _record: object) -> None:
    connection.isolation_level = None  # the driver's own timing of BEGIN breaks savepoints and DDL; we send it
    for pragma in _PRAGMAS:
        connection.execute(pragma)
    until = time.monotonic() + _BUSY_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            # The change of mode is rejected at once, not after the timeout, while another process opens or closes the
            # file.
            if "locked" not in str(error) or time.monotonic() > until:
                raise
            time.sleep(0.01)


def _empty_log(engine: Engine, path: Path) -> None:
    """Write the content of the write-ahead log into the file, and truncate the log, which still holds deleted rows."""
    until, busy = time.monotonic() + _EMPTIED_S, 1
    with _outside_transactions(engine) as connection:
        connection.execute(f"PRAGMA busy_timeout={_CHECKPOINT_MS}")  # writers wait while this one waits for readers
        try:
            while busy and time.monotonic() < until:
                (busy, _, _) = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
                time.sleep(0.05 if busy else 0.0)
        finally:
            connection.execute(_PATIENT)
    if busy:
        logger.warning("lightning: store %s is being read: deleted text is in its log until the next deletion", path)


def _rewrite(engine: Engine, path: Path) -> None:
    with _outside_transactions(engine) as connection:
        connection.execute("VACUUM")
    _empty_log(engine, path)


@contextmanager
def _outside_transactions(engine: Engine) -> Iterator[Any]:
    """Yield a connection of the driver: SQLAlchemy's are in a transaction as soon as they are used."""
    lent = engine.raw_connection()
    try:
        yield lent.driver_connection
    finally:
        lent.close()


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _check(path: Path, opened: tuple[int, int] | None) -> None:
    """Check that a write goes to the existing file: SQLite would keep writing to a deleted one."""
    if _identity(path) != opened:
        raise StoreGoneError(
            f"store {path}: the file was deleted or replaced while it was in use, "
            "and its contents are lost. Nothing more is written to it; open the store again to create a new one."
        )


def _begin(turnstile: Turnstile, check: Callable[[], None]) -> Callable[[Connection], None]:
    def on_begin(connection: Connection) -> None:
        if not connection.get_execution_options().get(_WRITER):
            connection.exec_driver_sql("BEGIN")
            return
        # A writer takes the lock at once: a transaction that reads first and then writes would fail, not wait, if
        # another process wrote in between.
        check()
        with turnstile:
            connection.exec_driver_sql("BEGIN IMMEDIATE")

    return on_begin


class Turnstile:
    """A lock that writers of several processes take one by one, before they wait for the database's lock.

    SQLite's lock goes to whichever process asks at the right moment: one that writes continuously asks again right
    after its commit, while the others sleep; of three continuous writers, one waited for more than a second. The
    turnstile makes turns fair, and nothing else depends on it: after `_TURN_S`, and if files cannot be opened or
    locked, writers continue without it. A process that holds it for longer may never release it: then nobody waits for
    it until it is free again.
    """

    def __init__(self, path: Path) -> None:
        self._store = path
        self._path = path.with_name(f"{path.name}-turn")
        self._file: int | None = None
        self._stuck = False  # whether it was held for too long, and has not been free since

    def __enter__(self) -> None:
        if sys.platform == "win32":
            return
        if self._file is None:
            self._file = self._open_file()
        if self._file is None:
            return
        until = time.monotonic() + _TURN_S
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    return  # a file system without such locks
            else:
                self._stuck = False
                return
            if self._stuck or time.monotonic() > until:
                self._stuck = True
                return
            time.sleep(random.uniform(0.0005, 0.002))

    def _open_file(self) -> int | None:
        """Open the file, created with the store's own mode, so that all writers of the store can take turns."""
        try:
            return os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            pass
        except PermissionError:
            return None
        mode = stat.S_IMODE(self._store.stat().st_mode)
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, mode)
        with suppress(OSError):  # another user created it first
            os.fchmod(file, mode)
        return file

    def __exit__(self, *exc: object) -> None:
        if sys.platform != "win32" and self._file is not None:
            with suppress(OSError):
                fcntl.flock(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        """Close the file, which stays for the others."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
