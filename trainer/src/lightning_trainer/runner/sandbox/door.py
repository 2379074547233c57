"""The way out of a sandbox: connections to one port in there, relayed to one address out here."""

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

PORT: Final = 18480  # on the sandbox's own loopback; below those that the system hands out
SOCKET: Final = "door"  # name of the socket in the folder
TERMINATE: Final = b"t"  # what the starter is sent when its command is to end
_MOST_CONNECTIONS: Final = 128  # of one command at a time: they take descriptors of the worker that others need, too
_PIECE: Final = 1 << 16


def inside(endpoint: str | None) -> str | None:
    """Return the address by which a sandbox's programs reach an endpoint; TLS ends outside."""
    return None if endpoint is None else f"http://127.0.0.1:{PORT}{urlsplit(endpoint).path}"


class Door:
    """A context in which one command can be started and reach one address. It takes one starter, and then no more.

    Args:
        endpoint: where all connections lead; None: the command reaches nothing.
        descriptors: that the command gets, under the same numbers.
        place: a folder that the sandbox does not see.
    """

    def __init__(self, endpoint: str | None, descriptors: Sequence[int], place: Path) -> None:
        self._endpoint, self._descriptors, self._place = endpoint, descriptors, place
        self._serving: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._line: socket.socket | None = None

    @property
    def arguments(self) -> list[str]:
        """What the starter has to know, beside the path of the socket."""
        port = 0 if self._endpoint is None else PORT
        return [str(port), ",".join(map(str, self._descriptors))]

    async def __aenter__(self) -> Door:
        self.folder = Path(tempfile.mkdtemp(prefix="door-", dir=self._place))
        self._listener = _listen(self.folder)
        self._opening = asyncio.ensure_future(self._open())
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Close all, which ends what the starter started."""
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
        """Ask what runs in the sandbox to end (SIGTERM); return False where nothing was started there yet."""
        if self._line is None:
            return False
        with contextlib.suppress(OSError):  # it has ended
            self._line.send(TERMINATE, socket.MSG_DONTWAIT | getattr(socket, "MSG_NOSIGNAL", 0))
        return True

    async def _open(self) -> None:
        """Meet the starter, then keep the line to it: its end is the sandbox's."""
        line, _ = await asyncio.get_running_loop().sock_accept(self._listener)
        with line:
            (self.folder / SOCKET).unlink()
            self._listener.close()  # nobody else is met
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
        """Join a connection of the sandbox to a new one to the endpoint, until both ways are closed."""
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
    """Return the socket that the starter offers; None where it has none or has gone."""
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
