"""Server-sent events: written and read."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, Final

import orjson

MOST_BYTES: Final = 8 * 2**20  # of one event
DONE: Final = b"data: [DONE]\n\n"


def event(data: Any) -> bytes:
    """Give a JSON event's bytes."""
    return b"data: " + orjson.dumps(data) + b"\n\n"


async def events_in(chunks: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """Cut a stream of bytes into the data of its events; comments and other fields are left out.

    Raises:
        ValueError: an event is larger than any that a model server sends.
    """
    rest = b""
    async for chunk in chunks:
        *whole, rest = (rest + chunk).replace(b"\r\n", b"\n").split(b"\n\n")
        for one in whole:
            lines = [line[5:].removeprefix(b" ") for line in one.split(b"\n") if line.startswith(b"data:")]
            if lines:
                yield b"\n".join(lines)
        if len(rest) > MOST_BYTES:
            raise ValueError(f"an event of more than {MOST_BYTES} bytes")
