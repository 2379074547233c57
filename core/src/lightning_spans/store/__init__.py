"""The store, which joins spans and calls. Opened by URL: an SQL database, a server, or a store that keeps nothing."""

from __future__ import annotations

from lightning_spans.errors import ConfigError
from lightning_spans.store.protocol import Store
from lightning_spans.store.urls import without_secrets

__all__ = ["Store", "open_store"]


def open_store(url: str, *, key: str | None = None, create: bool = True) -> Store:
    """Open a store by URL or path.

    Args:
        url: ``sqlite:///path.db``, a plain path, ``postgresql://user@host/database``, or a server's ``http(s)://...``.
        key: for a server: the bearer key; by default `LIGHTNING_KEY` of the environment.
        create: for a file: create it if it does not exist. Readers pass False.

    Raises:
        ConfigError: the URL's scheme is none of these, or the driver for its database is not installed.
        StoreError: it cannot be opened.
    """
    scheme = url.split("://", 1)[0] if "://" in url else "sqlite"
    if scheme in {"http", "https"}:
        from lightning_spans.store.http import HttpStore

        return HttpStore(url, key=key)
    if scheme == "sqlite" or scheme.startswith(("postgres", "sqlite+")):
        from lightning_spans.store.sql.store import SqlStore

        return SqlStore(url if "://" in url else f"sqlite:///{url}", create=create)
    raise ConfigError(
        f"store {without_secrets(url)!r}: unknown scheme {scheme!r}. Use a path, sqlite:///path.db, postgresql:// or http://."
    )
