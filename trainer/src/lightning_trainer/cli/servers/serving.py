"""Shared parts of `serve` and `server`: keys in files, one line of JSON when ready, and a clean shutdown."""

from __future__ import annotations

import logging
import re
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from lightning_spans.errors import ConfigError, StoreError
from lightning_trainer.flags.common import print_json
from lightning_trainer.flags.files import plain_http_option
from lightning_trainer.flags.group import group_options

if TYPE_CHECKING:
    from lightning_spans.store import Store
    from lightning_trainer.gateway.auth.key_files import KeyFiles
    from lightning_trainer.gateway.auth.keys import Scope
    from lightning_trainer.gateway.http.serving import ServerThread


logger = logging.getLogger(__name__)
STORE_S: Final = 60.0  # for a database that starts at the same time as the server
_STARTING: Final = re.compile(r"(?i)starting up|shutting down|connection refused|in recovery mode")


@contextmanager
def key_files(key_file: Path | None, *scopes: Scope, rotate: bool = False) -> Iterator[KeyFiles]:
    """Create keys and write them where only their owner can read them.

    Args:
        key_file: for the admin key; the secret is stored next to it, so that keys outlive the server. None: a folder
            that is deleted with the process.
        scopes: other scopes, each with its own file next to it.
        rotate: sign with a new secret; see `Keys.from_file`.

    Yields:
        The files, which `serve_until_stopped` renews.

    Raises:
        ConfigError: a file cannot be written.
    """
    from lightning_trainer.gateway.auth.key_files import KeyFiles
    from lightning_trainer.gateway.auth.keys import Keys

    with tempfile.TemporaryDirectory(prefix="lightning-keys-") as folder:
        path = (key_file or Path(folder) / "admin.key").absolute()
        keys = Keys.from_file(path.with_name(f"{path.name}.secret"), rotate=rotate) if key_file else Keys.fresh()
        others: dict[Scope, Path] = {scope: path.with_name(f"{path.name}.{scope}") for scope in scopes}
        files = KeyFiles(keys, {"admin": path, **others})
        files.write()
        yield files


@contextmanager
def opened_when_ready(url: str, *, wait_s: float = STORE_S, pause_s: float = 1.0) -> Iterator[Store]:
    """Open a store like `session.open_database`, but wait for a database that is still starting.

    Raises:
        StoreError: it cannot be opened for another reason, or not within `wait_s` seconds.
        ConfigError: see `session.open_database`.
    """
    from lightning_trainer.session.session import open_database

    until = time.monotonic() + wait_s
    with ExitStack() as stack:
        while True:
            try:
                store = stack.enter_context(open_database(url))
                break
            except StoreError as error:
                if not _STARTING.search(str(error)) or time.monotonic() > until:
                    raise
                logger.warning("waiting for the database: %s", error)
                time.sleep(pause_s)
        yield store


tls_options = group_options(
    click.option("--tls-cert", type=click.Path(path_type=Path), help="TLS certificate with its chain (PEM)."),
    click.option("--tls-key", type=click.Path(path_type=Path), help="Private key of the TLS certificate (PEM)."),
    plain_http_option("Keys"),
)


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """The address and TLS options to listen with; the fields are those of `ServerThread`."""

    host: str
    port: int
    tls_cert: Path | None = None
    tls_key: Path | None = None
    plain: bool = False
    names: tuple[str, ...] = ()


def check_place(place: ListenAddress) -> None:
    """Reject an address where nothing can be served, before anything is created that would be left behind.

    Raises:
        ConfigError: see `serve_until_stopped`.
    """
    _server(None, place).check()


def _server(app: Any, place: ListenAddress) -> ServerThread:
    from lightning_trainer.gateway.http.serving import ServerThread, Tls

    if (place.tls_cert is None) != (place.tls_key is None):
        raise ConfigError("--tls-cert and --tls-key belong together: give both.")
    tls = Tls(place.tls_cert, place.tls_key) if place.tls_cert and place.tls_key else None
    return ServerThread(app, place.host, place.port, tls=tls, plain=place.plain, names=place.names)


def serve_until_stopped(
    app: Any, place: ListenAddress, files: KeyFiles, *, stopping: Callable[[], None] = lambda: None, **facts: Any
) -> None:
    """Serve an app, report it in one line of JSON, and renew its keys until Ctrl-C or SIGTERM.

    Args:
        app: the app.
        place: where to listen.
        files: the files of its keys.
        stopping: called before waiting for responses in progress.
        facts: further entries of that line.

    Raises:
        ConfigError: the port is in use, the address is not of this machine, or encryption is required and not
            configured.
    """
    asked = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: asked.set())
    app.state.key_status = files.status
    server = _server(app, place)
    url = server.start()
    try:
        print_json({"url": url, **files.paths, **facts})
        while not asked.wait(1.0):
            files.renew()
        click.echo("stopping", err=True)
    finally:
        stopping()
        server.stop()
