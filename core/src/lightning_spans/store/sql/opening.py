"""Finds the database that a URL names, and opens it."""

from __future__ import annotations

from typing import Final

from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError

from lightning_spans.errors import ConfigError
from lightning_spans.store.sql import postgres, sqlite
from lightning_spans.store.sql.database import POSTGRESQL, SQLITE, Database
from lightning_spans.store.urls import without_secrets

_OPENS: Final = "Use a path, sqlite:///path.db or postgresql://user@host/database."


def open_database(url: str, *, create: bool = True) -> Database:
    """Open the database of a URL.

    Args:
        url: ``sqlite:///path`` or ``postgresql://...``; of the drivers for PostgreSQL, psycopg.
        create: for a file: create it if it does not exist.

    Raises:
        ConfigError: it is not a URL, names another database, or the driver is not installed.
        StoreError: no file is named, it is missing, or its folder is.
    """
    parsed = _parse_url(url)
    if parsed.get_backend_name() == SQLITE:
        return sqlite.open_database(parsed, create=create)
    return postgres.open_database(parsed)


def _parse_url(url: str) -> URL:
    try:
        parsed = make_url(url.replace("postgres://", "postgresql://", 1) if url.startswith("postgres:") else url)
    except (ArgumentError, ValueError):  # the second if the port is not a number
        raise ConfigError(f"store {without_secrets(url)!r} is not a database URL. {_OPENS}") from None
    if parsed.get_backend_name() not in (SQLITE, POSTGRESQL):
        shown = parsed.render_as_string(hide_password=True)
        raise ConfigError(f"store {shown!r}: traces are kept in SQLite or PostgreSQL. {_OPENS}")
    return parsed
