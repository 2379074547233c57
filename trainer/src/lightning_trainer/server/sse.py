"""Server-sent events: written and read."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, Final

import orjson

MOST_BYTES: Final = 8 * 2**20  # of one event
_LF: Final = ord("\n")
DONE: Final = b"data: [DONE]\n\n"


def event(data: Any) -> bytes:
    """Give a JSON event's bytes."""
    return b"data: " + orjson.dumps(data) + b"\n\n"


class Events:
    """Cuts a stream of bytes into the data of its events; comments and other fields are left out."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> list[bytes]:
        """Take what came; give the data of the events that are whole now.

        Raises:
            ValueError: an event is larger than any that a model server sends.
        """
        if not self._rest and piece.startswith(b"data: ") and piece.find(b"\n") == len(piece) - 2 and piece[-1] == _LF:
            return [piece[6:-2]]  # one event and nothing else, as nearly always
        *whole, self._rest = (self._rest + piece).replace(b"\r\n", b"\n").split(b"\n\n")
        if len(self._rest) > MOST_BYTES:
            raise ValueError(f"an event of more than {MOST_BYTES} bytes")
        return [data for one in whole if (data := _data(one)) is not None]


async def events_in(chunks: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """Cut a stream into the data of its events; see `Events`."""
    events = Events()
    async for chunk in chunks:
        for data in events.feed(chunk):
            yield data


def _data(event: bytes) -> bytes | None:
    if event.startswith(b"data: ") and b"\n" not in event:  # as nearly all are
        return event[6:]
    lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None
