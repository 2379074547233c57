"""Serves the app from a thread with its own event loop, next to the training loop."""

from __future__ import annotations

import errno
import gc
import socket
import ssl
import stat
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from lightning_spans.errors import ConfigError
from lightning_spans.record.stalls import waiting
from lightning_trainer.gateway.http.guard import Guard, is_loopback, loopback_names

_START_S: Final = 30.0
_GRACE_S: Final = 5  # seconds for running responses to end when the server stops
_COLLECT_AFTER: Final = 20_000  # objects between two collections of the youngest generation while a server runs


@dataclass(frozen=True, slots=True)
class Tls:
    """The server's certificate with its chain, and its key, as PEM files."""

    certificate: Path
    key: Path


class ServerThread:
    """An ASGI app, served over HTTP."""

    def __init__(
        self,
        app: Any,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        tls: Tls | None = None,
        plain: bool = False,
        names: Iterable[str] = (),
    ) -> None:
        """Prepare.

        Args:
            app: an ASGI app.
            host: address to listen on; other machines reach ``0.0.0.0``, only this one ``127.0.0.1``.
            port: 0 takes a free one.
            tls: certificate and key; None: without encryption, which serves other machines only if `plain`.
            plain: serve other machines without encryption.
            names: other names under which a server on loopback may be requested, such as those of a proxy in front of
                it.

        Raises:
            ConfigError: other machines could reach it without encryption, and nobody permitted that.
        """
        local = is_loopback(host)
        if not (local or tls or plain):
            raise ConfigError(
                f"{host} can be reached from other machines, and keys would travel unencrypted. Give --tls-cert and"
                " --tls-key, or say --plain-http where the network is your own."
            )
        self._app = Guard(app, names=loopback_names(names) if local else None)
        self._tls = tls
        self._host = host
        self._port = port
        self._server: Any = None
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self.url = ""  # base URL, once it was entered

    def check(self) -> None:
        """Check that the certificate can be read and the port is free, without using either.

        Raises:
            ConfigError: see `start`.
        """
        if self._tls is not None:
            _check_mode(self._tls.key)
            try:
                ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
                    self._tls.certificate, self._tls.key
                )
            except OSError as error:  # ssl.SSLError is one
                raise _wrong_certificate(self._tls, error) from None
        _listen(self._host, self._port).close()

    def start(self) -> str:
        """Listen, and wait until requests are answered.

        Returns:
            The base URL, without a slash at its end.

        Raises:
            ConfigError: the port is in use or not permitted, the address is not this machine's, or the app fails.
        """
        import uvicorn

        from lightning_trainer.gateway.http.timeouts import BoundedProtocol

        listener = _listen(self._host, self._port)
        port = listener.getsockname()[1]
        config = uvicorn.Config(
            self._app,
            log_config=None,
            log_level="warning",
            access_log=False,  # request lines are counted in /metrics; headers, which contain keys, are never logged
            lifespan="on",
            timeout_graceful_shutdown=_GRACE_S,
            timeout_keep_alive=75,  # longer than clients keep idle connections, so that the clients close them
            ws="none",
            http=BoundedProtocol,
            proxy_headers=False,  # nothing here depends on the client's claimed address
            server_header=False,
            date_header=False,
            ssl_certfile=self._tls.certificate if self._tls else None,
            ssl_keyfile=self._tls.key if self._tls else None,
        )
        _check(config, self._tls)
        started = threading.Event()
        self._server = _server(config, started)
        self._thread = threading.Thread(
            target=self._run, args=(listener, started), name="lightning-server", daemon=True
        )
        self._thread.start()
        if not started.wait(_START_S) or self._failure is not None or not self._server.started:
            listener.close()
            raise ConfigError(f"the server did not start on {self._host}:{port}: {self._failure or 'see the log'}")
        _freeze_objects()
        self._thresholds = gc.get_threshold()
        # Collecting the objects of replies every 700 takes another 0.2 ms per reply.
        gc.set_threshold(max(_COLLECT_AFTER, self._thresholds[0]), *self._thresholds[1:])
        shown = "127.0.0.1" if self._host in {"0.0.0.0", ""} else f"[{self._host}]" if ":" in self._host else self._host  # noqa: S104 - only compared
        return f"{'https' if self._tls else 'http'}://{shown}:{port}"

    def _run(self, listener: socket.socket, started: threading.Event) -> None:
        try:
            self._server.run(sockets=[listener])
        except BaseException as error:  # noqa: BLE001 - told by start(); uvicorn ends with SystemExit
            self._failure = error
        finally:
            started.set()

    def stop(self) -> None:
        """Let running responses end, for a few seconds, then stop. Does nothing if it is not running."""
        if self._thread is not None:
            self._server.should_exit = True
            with waiting("shutdown", "the server, to answer what is under way and to write it down"):
                self._thread.join()
            self._thread = None
            gc.set_threshold(*self._thresholds)
            gc.unfreeze()

    def __enter__(self) -> ServerThread:
        self.url = self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()


def _freeze_objects() -> None:
    """Hide the existing objects from the garbage collector.

    Otherwise the collector traverses them again and again because of the many objects that each reply creates and
    drops: 0.4 ms per reply of 51 KB, measured.
    """
    gc.collect()
    gc.freeze()


def _check(config: Any, tls: Tls | None) -> None:
    """Read the certificate before listening."""
    if tls is not None:
        _check_mode(tls.key)
    try:
        config.load()
    except OSError as error:  # ssl.SSLError is one
        if tls is None:
            raise
        raise _wrong_certificate(tls, error) from None


def _check_mode(key: Path) -> None:
    """Reject a key that every user of the machine may read.

    Raises:
        ConfigError: it is one.
    """
    if key.exists() and key.stat().st_mode & (stat.S_IROTH | stat.S_IWOTH):
        raise ConfigError(
            f"every user may read or change the TLS key {key}. Run: chmod 600 {key} (a Secret of Kubernetes:"
            " defaultMode: 0400)."
        )


def _wrong_certificate(tls: Tls, error: OSError) -> ConfigError:
    return ConfigError(f"certificate {tls.certificate} with key {tls.key}: {error}")


def _server(config: Any, started: threading.Event) -> Any:
    import uvicorn

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            started.set()

    return Server(config)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    # a port that was just released is free; one in use is not
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(2048)
    except (OSError, OverflowError) as error:
        listener.close()
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} on {host} is in use. Stop what listens there, or choose another with --port;"
                " --port 0 takes a free one."
            ) from None
        raise ConfigError(f"can't listen on {host}:{port}: {error}. Choose another --host or --port.") from None
    return listener
