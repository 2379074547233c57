"""Messages between a runner and its worker processes: JSON objects, each preceded by its length in four bytes."""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any, Final, TypeAlias

from lightning_spans.schema.attempts import Attempt
from lightning_spans.schema.json import dumps, from_json, loads, to_json

Message: TypeAlias = dict[str, Any]

FLUSH_S: Final = 30.0  # in which a worker delivers the spans of an attempt that has ended

_LENGTH = struct.Struct(">I")


def encode(message: Message) -> bytes:
    """Return the bytes of one message, also of what plain JSON cannot represent, such as a lone surrogate."""
    body = dumps(message)
    return _LENGTH.pack(len(body)) + body


async def receive(reader: asyncio.StreamReader) -> Message | None:
    """Read one message; None if the other side has ended."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        body = await reader.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    message: Message = loads(body)
    return message


def receive_blocking(sock: socket.socket) -> Message:
    """Read one message, without an event loop.

    Raises:
        EOFError: the other side has ended.
    """
    with sock.makefile("rb", buffering=0) as stream:
        (length,) = _LENGTH.unpack(_exactly(stream, _LENGTH.size))
        message: Message = loads(_exactly(stream, length))
        return message


def _exactly(stream: socket.SocketIO, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = stream.read(size - len(data))
        if not piece:
            raise EOFError("the runner has gone")
        data += piece
    return data


def attempt_to_json(attempt: Attempt) -> Message:
    """Return an attempt's context as a JSON object."""
    return to_json(attempt)


def attempt_from_json(data: Message) -> Attempt:
    """Parse the result of `attempt_to_json`."""
    return from_json(Attempt, data)
