"""PostgreSQL: how it is reached, which waits are bounded, which errors are temporary."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Final

from sqlalchemy import URL, Connection, Engine, create_engine, event, text
from sqlalchemy.exc import DBAPIError, NoSuchModuleError, OperationalError

from lightning_spans.errors import ConfigError
from lightning_spans.store.sql.database import INTO, Database
from lightning_spans.store.sql.schema import metadata

logger = logging.getLogger("lightning_spans")

_DRIVER: Final = "postgresql+psycopg"
_MISSING: Final = (
    "a store in PostgreSQL needs the psycopg driver. Install it: pip install 'lightning-trainer[postgres]'"
    " (or 'lightning-spans[postgres]')"
)
# libpq would wait for these without limit. The URL's own values have priority.
_BOUNDS: Final = {"connect_timeout": "10", "keepalives_idle": "30", "tcp_user_timeout": "30000"}
_SESSION: Final = (
    # Acknowledged means on disk, whatever the server's default is; stricter settings than "on" are kept.
    "SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off'",
    "SET lock_timeout = '30s'",
    # A writer that was stopped in the middle of a transaction must not block the others for ever.
    "SET idle_in_transaction_session_timeout = '30s'",
)
_MANY: Final = 50  # number of rows from which a COPY costs less than single INSERTs
_MAY_COPY: Final = "SELECT has_database_privilege(current_database(), 'TEMPORARY')"
_TABLES_KEY: Final = 0x6C69676874  # of the advisory lock for creating and changing tables
# serialization_failure, deadlock_detected, lock_not_available; errors of a server that stops, starts or is full
_PASSING: Final = frozenset({"40001", "40P01", "55P03", "57P01", "57P02", "57P03", "53300"})


def open_database(url: URL) -> Database:
    """Prepare to connect. Nothing is sent yet.

    Args:
        url: ``postgresql://...`` or ``postgresql+psycopg://...``.

    Raises:
        ConfigError: another driver is named, or psycopg is not installed.
    """
    if url.drivername not in {"postgresql", _DRIVER}:
        raise ConfigError(f"store {url.drivername}://...: the driver for PostgreSQL is psycopg. Use postgresql://.")
    engine = _open_engine(url.set(drivername=_DRIVER))
    return Database(
        engine=engine,
        close=engine.dispose,
        writer=lambda: engine.connect().execution_options(isolation_level="READ COMMITTED"),
        lock=_lock,
        elapsing_ns=_server_clock_ns,
        after_delete=lambda: None,  # the server clears dead rows itself: see docs/reference/store.md
        compact=lambda: _rewrite(engine),
        error=DBAPIError,
        transient=_transient,
        name=url.set(query={}).render_as_string(),
        advice="Does the server run there, and may this user make tables in that database?",
    )


def _open_engine(url: URL) -> Engine:
    try:
        engine = create_engine(
            url.update_query_dict({name: value for name, value in _BOUNDS.items() if name not in url.query}),
            pool_size=8,
            max_overflow=8,
            pool_pre_ping=True,  # a restarted server has closed the connections in the pool
            isolation_level="REPEATABLE READ",  # a read of several statements sees one moment
        )
    except (ModuleNotFoundError, NoSuchModuleError) as error:
        raise ConfigError(f"{_MISSING} ({error}).") from None
    event.listen(engine, "connect", _on_connect)
    event.listen(engine, "do_executemany", _copy)
    return engine


def _on_connect(connection: Any, record: Any) -> None:
    with connection.cursor() as cursor:
        for statement in _SESSION:
            cursor.execute(statement)
        record.info[_MAY_COPY] = cursor.execute(_MAY_COPY).fetchone()[0]
    connection.commit()


def _copy(cursor: Any, _statement: str, rows: Sequence[Sequence[Any]], context: Any) -> bool:
    """Insert many new rows by COPY, for about half of the CPU time of single INSERTs.

    COPY fails if a row exists, so the rows go through a temporary table. It is emptied when the transaction ends, and
    also at the start, because the transaction may contain the writes of several callers.

    Returns:
        Whether it was done: few rows, and those of a user who may not create temporary tables, are left to SQLAlchemy.
    """
    table, names = context.execution_options.get(INTO, (None, ()))
    if table is None or len(rows) < _MANY or not context.root_connection.info[_MAY_COPY]:
        return False
    columns = ", ".join(table.c[name].name for name in names)
    passing = f"new_{table.name}"
    like = f"SELECT {columns} FROM {table.name}"  # noqa: S608 - our own names, as below
    cursor.execute(f"CREATE TEMPORARY TABLE IF NOT EXISTS {passing} ON COMMIT DELETE ROWS AS {like} WITH NO DATA")
    cursor.execute(f"DELETE FROM {passing}")  # noqa: S608
    with cursor.copy(f"COPY {passing} ({columns}) FROM STDIN") as copy:
        for row in rows:
            copy.write_row(row)
    cursor.execute(f"INSERT INTO {table.name} ({columns}) SELECT * FROM {passing} ON CONFLICT DO NOTHING")  # noqa: S608
    return True


def _lock(connection: Connection) -> None:
    if connection.scalar(text("SHOW fsync")) == "off":
        logger.warning("lightning: PostgreSQL runs with fsync=off: what the store acknowledges may be lost in a crash")
    connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _TABLES_KEY})


def _rewrite(engine: Engine) -> None:
    """Rewrite the tables into new files, without dead rows; each is locked meanwhile."""
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        for table in metadata.sorted_tables:
            connection.execute(text(f"VACUUM (FULL, ANALYZE) {table.name}"))


def _server_clock_ns(connection: Connection) -> int:
    now: int = connection.scalar(text("SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint * 1000")) or 0
    return now


def _transient(error: BaseException) -> bool:
    if not isinstance(error, DBAPIError):
        return False
    if error.connection_invalidated:
        return True
    state = getattr(error.orig, "sqlstate", None)
    return state in _PASSING or (state is None and isinstance(error, OperationalError))  # None: it cannot be reached
