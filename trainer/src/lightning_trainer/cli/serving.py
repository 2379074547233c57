"""What `serve` and `server` share: keys in files, one line of JSON when ready, and a clean end."""

from __future__ import annotations

import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from lightning_spans.errors import ConfigError
from lightning_trainer.cli.options import print_json

if TYPE_CHECKING:
    from lightning_trainer.server.keys import Keys


F = TypeVar("F", bound=Callable[..., Any])


@contextmanager
def key_files(key_file: Path | None, *names: str, rotate: bool = False) -> Iterator[tuple[Keys, dict[str, str]]]:
    """Make keys and write them where only their owner can read them.

    Args:
        key_file: for the admin key; the secret lies beside it, so that keys outlive the server. None: a folder that
            goes with the process.
        names: other scopes that get a file of their own beside it.
        rotate: sign with a new secret; see `Keys.from_file`.

    Yields:
        The keys, and the paths of the files by name: ``key_file`` for the admin key, ``runner_key_file``, ...

    Raises:
        ConfigError: a file can't be written.
    """
    from lightning_trainer.server.keys import Keys, write_private

    with tempfile.TemporaryDirectory(prefix="lightning-keys-") as folder:
        path = (key_file or Path(folder) / "admin.key").absolute()
        keys = Keys.from_file(path.with_name(f"{path.name}.secret"), rotate=rotate) if key_file else Keys.fresh()
        files = {"key_file": path, **{f"{name}_key_file": path.with_name(f"{path.name}.{name}") for name in names}}
        try:
            for (scope, _), file in zip((("admin", 0), *((name, 0) for name in names)), files.values(), strict=True):
                write_private(file, keys.issue(scope))  # type: ignore[arg-type]
        except OSError as error:
            raise ConfigError(f"key file {path} can't be written: {error.strerror}. Choose --key-file.") from None
        yield keys, {name: str(file) for name, file in files.items()}


def tls_options(command: F) -> F:
    """Add the options of encryption to a command."""
    for option in reversed(
        (
            click.option("--tls-cert", type=click.Path(path_type=Path), help="Certificate with its chain, as PEM."),
            click.option("--tls-key", type=click.Path(path_type=Path), help="Key of the certificate, as PEM."),
            click.option(
                "--plain-http", is_flag=True, help="Serve other machines without encryption: keys can be read."
            ),
        )
    ):
        command = option(command)
    return command


@dataclass(frozen=True, slots=True)
class Place:
    """Where to listen, and how; the fields are those of `ServerThread`."""

    host: str
    port: int
    tls_cert: Path | None = None
    tls_key: Path | None = None
    plain: bool = False
    names: tuple[str, ...] = ()


def serve_until_stopped(app: Any, place: Place, files: dict[str, str], **facts: Any) -> None:
    """Serve an app, say so in one line of JSON, and go on until Ctrl-C or SIGTERM.

    Raises:
        ConfigError: the port is in use, the address is not of this machine, or encryption is wanted and not given.
    """
    from lightning_trainer.server.serving import ServerThread, Tls

    if (place.tls_cert is None) != (place.tls_key is None):
        raise ConfigError("--tls-cert and --tls-key belong together: give both.")
    tls = Tls(place.tls_cert, place.tls_key) if place.tls_cert and place.tls_key else None

    asked = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: asked.set())
    server = ServerThread(app, place.host, place.port, tls=tls, plain=place.plain, names=place.names)
    url = server.start()
    try:
        print_json({"url": url, **files, **facts})
        while not asked.wait(1.0):
            pass
        click.echo("stopping", err=True)
    finally:
        server.stop()
