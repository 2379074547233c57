"""Messages between a runner and its worker processes: JSON objects, each after its length in four bytes."""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any, TypeAlias

from lightning_spans.schema.attempts import Attempt
from lightning_spans.schema.json import dumps, from_json, loads, to_json

Message: TypeAlias = dict[str, Any]

_LENGTH = struct.Struct(">I")


def encode(message: Message) -> bytes:
    """Return the bytes of one message, also of what JSON can't hold as it is, such as half an emoji."""
    body = dumps(message)
    return _LENGTH.pack(len(body)) + body


async def receive(reader: asyncio.StreamReader) -> Message | None:
    """Read one message; None when the other side has gone."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        body = await reader.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    message: Message = loads(body)
    return message


def receive_blocking(sock: socket.socket) -> Message:
    """Read one message, with no event loop.

    Raises:
        EOFError: the other side has gone.
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
    """Read what `attempt_to_json` wrote."""
    return from_json(Attempt, data)
