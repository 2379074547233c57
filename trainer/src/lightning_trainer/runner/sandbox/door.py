"""The way out of a sandbox: connections to one port inside are relayed to one address outside."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import ssl
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

PORT: Final = 18480  # on the sandbox's own loopback; below the ports that the system assigns
SOCKET: Final = "door"  # name of the socket in the folder
TERMINATE: Final = b"t"  # sent to the starter when its command must end
_MOST_CONNECTIONS: Final = 128  # of one command: they use file descriptors of the worker that others need, too
_PIECE: Final = 1 << 16


def inside(endpoint: str | None) -> str | None:
    """Return the address by which programs in a sandbox reach an endpoint; TLS ends outside."""
    return None if endpoint is None else f"http://127.0.0.1:{PORT}{urlsplit(endpoint).path}"


class Door:
    """A context in which one command can be started and reach one address. It accepts one starter only.

    Args:
        endpoint: target of all connections; None: the command reaches nothing.
        descriptors: file descriptors that the command gets, under the same numbers.
        place: a folder that the sandbox does not see.

    Attributes:
        accepted: whether a starter has connected, so that the sandbox has been opened.
    """

    def __init__(self, endpoint: str | None, descriptors: Sequence[int], place: Path) -> None:
        self._endpoint, self._descriptors, self._place = endpoint, descriptors, place
        self._serving: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._line: socket.socket | None = None
        self.accepted = False

    @property
    def arguments(self) -> list[str]:
        """Arguments of the starter, in addition to the path of the socket."""
        port = 0 if self._endpoint is None else PORT
        return [str(port), ",".join(map(str, self._descriptors))]

    async def __aenter__(self) -> Door:
        self.folder = Path(tempfile.mkdtemp(prefix="door-", dir=self._place))
        self._listener = _listen(self.folder)
        self._opening = asyncio.ensure_future(self._open())
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Close all connections, which ends what the starter started."""
        self._opening.cancel()
        await asyncio.wait({self._opening})
        if self._serving is not None:
            self._serving.close()
        for connection in self._connections:
            connection.cancel()
        if self._connections:
            await asyncio.wait(self._connections)
        self._listener.close()
        await asyncio.to_thread(shutil.rmtree, self.folder, ignore_errors=True)

    def ask_to_end(self) -> bool:
        """Ask what runs in the sandbox to end (SIGTERM); return False if nothing was started there yet."""
        if self._line is None:
            return False
        with contextlib.suppress(OSError):  # it has ended
            self._line.send(TERMINATE, socket.MSG_DONTWAIT | getattr(socket, "MSG_NOSIGNAL", 0))
        return True

    async def _open(self) -> None:
        """Accept the starter, then keep the connection to it: when it closes, the sandbox ends."""
        line, _ = await asyncio.get_running_loop().sock_accept(self._listener)
        self.accepted = True  # before the starter gets what it needs to start its command
        with line:
            (self.folder / SOCKET).unlink()
            self._listener.close()  # no other starter is accepted
            socket.send_fds(line, [b"+"], list(self._descriptors))
            offered = await _receive(line)
            self._line = line
            if offered is not None:
                self._serving = await asyncio.start_server(self._relay, sock=offered)
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                self._line = None

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Relay a connection of the sandbox to a new one to the endpoint, until both directions are closed."""
        task = asyncio.current_task()
        if task is None or len(self._connections) >= _MOST_CONNECTIONS:
            writer.close()
            return
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)
        with contextlib.suppress(OSError, asyncio.CancelledError), contextlib.closing(writer):
            outer, outside = await _connect(self._endpoint or "")
            with contextlib.closing(outside):
                await asyncio.gather(_pump(reader, outside), _pump(outer, writer))


def _listen(folder: Path) -> socket.socket:
    """Return a socket that listens in a folder, however long the folder's path is."""
    listener = socket.socket(socket.AF_UNIX)
    listener.settimeout(0)
    number = os.open(folder, os.O_PATH)
    try:
        listener.bind(f"/proc/self/fd/{number}/{SOCKET}")
    finally:
        os.close(number)
    listener.listen(1)
    return listener


async def _receive(line: socket.socket) -> socket.socket | None:
    """Return the socket that the starter offers; None if it has none or has ended."""
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(line, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(line)
    _, descriptors, _, _ = socket.recv_fds(line, 1, 1)
    return socket.socket(fileno=descriptors[0]) if descriptors else None


async def _connect(endpoint: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    place = urlsplit(endpoint)
    secure = place.scheme == "https"
    context = ssl.create_default_context() if secure else None
    return await asyncio.open_connection(place.hostname, place.port or (443 if secure else 80), ssl=context)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while piece := await reader.read(_PIECE):
        writer.write(piece)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()
    else:
        writer.close()
