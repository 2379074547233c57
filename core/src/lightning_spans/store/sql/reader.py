"""A read-only store: nothing is written, no table is migrated, no lease is settled."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import quote

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url, select
from sqlalchemy.exc import ArgumentError, SQLAlchemyError
from sqlalchemy.pool import QueuePool

from lightning_spans.errors import ConfigError, StoreError
from lightning_spans.store.null import NullStore
from lightning_spans.store.protocol import ANY, PAGE, Page, Where, listing_of
from lightning_spans.store.sql import schema
from lightning_spans.store.sql.opening import open_database
from lightning_spans.store.sql.read import read_page
from lightning_spans.store.urls import without_secrets

R = TypeVar("R")
_BUSY_S: Final = 10.0


class SqlReader(NullStore):
    """A read-only store: records given to it are not kept.

    Unlike the store itself it does not take a writer's turn, so that a run whose store is read does not notice, and it
    opens files that cannot be written, such as those of another user's finished run.

    Args:
        url: a path, ``sqlite:///path`` or ``postgresql://...``.

    Raises:
        ConfigError: it names no such database.
        StoreError: there is no store, or one of another version.
    """

    def __init__(self, url: str) -> None:
        self._engine, self.elapsing_ns = _open_engine(_parse_url(url))
        try:
            with self.reading() as connection:
                version = max(connection.scalars(select(schema.schema_version.c.version)), default=0)
        except StoreError as error:
            self.close()
            raise StoreError(f"{url} can't be read as a store: {error}") from error
        if version != schema.VERSION:
            self.close()
            raise StoreError(
                f"{url} has version {version}, and this installation reads {schema.VERSION}. `lightning-rl traces"
                f" --store {url}` brings an older one up to date where it may be written."
            )

    def page(
        self,
        kind: type[R],
        where: Where = ANY,
        *,
        after: int = 0,
        limit: int | None = PAGE,
        newest_first: bool = False,
    ) -> Page[R]:
        """Read some records, of one moment; see `Store.page`."""
        listing_of(kind, where)
        with self.reading() as connection:
            return read_page(connection, kind, where, after, limit, newest_first=newest_first)

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """Yield a connection in a transaction that sees one moment.

        Raises:
            StoreError: it cannot be read.
        """
        try:
            with self._engine.connect() as connection:
                yield connection
        except SQLAlchemyError as error:
            raise StoreError(f"the store can't be read: {getattr(error, 'orig', None) or error}") from error

    def close(self) -> None:
        """Close the connections."""
        self._engine.dispose()


def _parse_url(url: str) -> URL:
    try:
        return make_url(url if "://" in url else f"sqlite:///{url}")
    except (ArgumentError, ValueError):  # the second if the port is not a number
        raise ConfigError(f"store {without_secrets(url)!r} is neither a path nor a database URL.") from None


def _open_engine(url: URL) -> tuple[Engine, Callable[[Connection], int]]:
    """Open a database, with the clock that all its users read identically, in nanoseconds."""
    if url.get_backend_name() != "sqlite":
        database = open_database(url.render_as_string(hide_password=False), create=False)
        return database.engine.execution_options(postgresql_readonly=True), database.elapsing_ns
    path = Path(str(url.database))
    if not path.is_file():
        raise StoreError(f"there is no store at {path}")
    mode = _mode(path)

    def connect() -> sqlite3.Connection:
        return sqlite3.connect(_uri(path, mode), uri=True, timeout=_BUSY_S, check_same_thread=False)

    engine = create_engine("sqlite://", creator=connect, poolclass=QueuePool, pool_size=4, max_overflow=4)
    event.listen(engine, "connect", _on_connect)
    event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN"))
    return engine, lambda _: time.monotonic_ns()


def _on_connect(connection: Any, _record: object) -> None:
    connection.isolation_level = None  # otherwise the driver would begin no transaction for reads
    connection.execute("PRAGMA query_only=ON")
    connection.execute("PRAGMA mmap_size=268435456")


def _mode(path: Path) -> str:
    """Choose how a file is opened. One in a read-only folder is opened as it is, if there is no log next to it."""
    try:
        with closing(sqlite3.connect(_uri(path, "mode=ro"), uri=True)) as connection:
            connection.execute("SELECT 1 FROM sqlite_master").fetchone()
    except sqlite3.OperationalError:
        log = path.with_name(f"{path.name}-wal")
        if log.exists() and log.stat().st_size:
            raise StoreError(f"{path} was not closed, and its folder can't be written. Copy the folder.") from None
        return "mode=ro&immutable=1"
    except sqlite3.DatabaseError as error:
        raise StoreError(f"{path} can't be read as a store: {error}") from None
    return "mode=ro"


def _uri(path: Path, mode: str) -> str:
    return f"file:{quote(str(path.absolute()))}?{mode}"
