"""A server in a process of its own, on SQLite or PostgreSQL, whose CPU time and memory can be asked for."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import tests_path  # noqa: F401 - for postgres.py

DATABASES = ("SQLite", "PostgreSQL")
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A running server.

    Attributes:
        url: where it is.
        key: an admin's key.
        pids: of the server, and of the database's processes where it has some.
    """

    url: str
    key: str
    server: int
    database: str | None  # folder of PostgreSQL's data, by which its processes are known

    def cpu_s(self) -> float:
        """CPU time of the server and its database so far, in seconds."""
        pids = [self.server, *(_postgres(self.database) if self.database else [])]
        return sum(_cpu_s(pid) for pid in pids)

    def memory_mib(self) -> float:
        """Resident memory of the server."""
        status = Path(f"/proc/{self.server}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) / 1024


def _cpu_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return (int(fields[11]) + int(fields[12]) + int(fields[13]) + int(fields[14])) / _TICKS


def _postgres(folder: str) -> list[int]:
    parent = int(Path(folder, "postmaster.pid").read_text().split()[0])
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [parent, *(int(child) for child in children)]


@contextmanager
def database(kind: str) -> Iterator[tuple[str, str | None]]:
    """Make an empty store. Gives its URL, and the folder of PostgreSQL's data."""
    with ExitStack() as stack:
        if kind == "SQLite":
            yield str(Path(stack.enter_context(tempfile.TemporaryDirectory())) / "bench.db"), None
        else:
            from support import postgres

            url = stack.enter_context(postgres.server())()
            yield url, url.split("host=")[1].split("&")[0]


@contextmanager
def server(kind: str) -> Iterator[RunningServer]:
    """Run a server on an empty store."""
    with database(kind) as (url, folder):
        command = [sys.executable, __file__, url]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            address, key = process.stdout.readline().split()
            yield RunningServer(address, key, process.pid, folder)
            process.stdin.close()
            process.wait(30)


def serve(url: str) -> None:
    """The other process: serve until the input ends."""
    from lightning_spans.store import open_store
    from lightning_trainer.gateway.app import create_app
    from lightning_trainer.gateway.auth.keys import Keys
    from lightning_trainer.gateway.http.serving import ServerThread

    keys, store = Keys.fresh(), open_store(url)
    with_app = ServerThread(create_app(store, keys=keys))
    print(with_app.start(), keys.issue("admin"), flush=True)
    sys.stdin.read()
    with_app.stop()
    store.close()


if __name__ == "__main__":
    serve(sys.argv[1])
