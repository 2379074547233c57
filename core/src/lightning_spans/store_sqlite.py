"""All that is SQLite's own: how a file is opened, and the one statement that differs between databases."""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, Insert, Table, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError

from lightning_spans.errors import ConfigError, StoreError

_WRITER = "lightning_writer"
_BUSY_S = 30.0  # how long a writer waits for another process's transaction
_PRAGMAS = (
    f"PRAGMA busy_timeout={int(_BUSY_S * 1000)}",
    "PRAGMA synchronous=FULL",  # in WAL mode, NORMAL would lose acknowledged transactions when the power fails
    "PRAGMA wal_autocheckpoint=4000",
    "PRAGMA cache_size=-16000",
)


def parse_url(url: str) -> URL:
    """Read a store's URL.

    Raises:
        ConfigError: it is no URL, or of a database that this version does not speak.
    """
    try:
        parsed = make_url(url)
    except ArgumentError:
        raise ConfigError(f"store {url!r} is not a database URL. Use a path or sqlite:///path.db.") from None
    if parsed.get_backend_name() != "sqlite":
        raise ConfigError(
            f"store {parsed.render_as_string(hide_password=True)!r}: this version keeps traces in SQLite files only."
            " Use a path or sqlite:///path.db; for several machines run 'lightning-rl server' and name its http:// URL."
        )
    return parsed


def open_engine(url: URL, *, create: bool) -> Engine:
    """Open a file so that a transaction once committed is on disk.

    Args:
        url: ``sqlite:///path``.
        create: make the file where there is none.

    Raises:
        StoreError: no file is named, it is missing, or its folder is.
    """
    if url.database in (None, "", ":memory:") or "mode=memory" in str(url):
        raise StoreError("the store needs a file: what it has taken must outlive the process. Use sqlite:///path.db.")
    path = Path(str(url.database))
    if not path.parent.is_dir():
        raise StoreError(f"store {path}: the folder {path.parent} does not exist. Make it first.")
    if not create and not path.exists():
        raise StoreError(f"there is no store at {path}. Is the path right?")
    engine = create_engine(url, pool_size=8, max_overflow=-1, connect_args={"timeout": _BUSY_S})
    event.listen(engine, "connect", _on_connect)
    event.listen(engine, "begin", _on_begin)
    return engine


def _on_connect(connection: Any, _record: object) -> None:
    connection.isolation_level = None  # the driver's own idea of when to BEGIN breaks savepoints and DDL; we say it
    for pragma in _PRAGMAS:
        connection.execute(pragma)
    until = time.monotonic() + _BUSY_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            # The change of mode is refused at once, not after the timeout, while another process opens or closes it.
            if "locked" not in str(error) or time.monotonic() > until:
                raise
            time.sleep(0.01)


def _on_begin(connection: Connection) -> None:
    # A writer takes the lock at once: a transaction that reads first and then writes would fail, not wait, when another
    # process wrote in between.
    immediate = connection.get_execution_options().get(_WRITER)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if immediate else "BEGIN")


def writer_connection(engine: Engine) -> Connection:
    """Open a connection whose transactions exclude other writers from their beginning."""
    return engine.connect().execution_options(**{_WRITER: True})


def insert_new(table: Table) -> Insert:
    """Insert rows, leaving those that are there as they are. PostgreSQL's dialect has the same method."""
    from sqlalchemy.dialects.sqlite import insert

    return insert(table).on_conflict_do_nothing()
