"""Server-sent events: the stream of a chat completion."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, Final

import orjson
from starlette.types import Send

_HEADERS: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies such as nginx would hold the chunks back
]
DONE: Final = b"data: [DONE]\n\n"


def event(data: Any) -> bytes:
    """Give a JSON event's bytes."""
    return b"data: " + orjson.dumps(data) + b"\n\n"


async def events_in(chunks: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """Cut a stream of bytes into the data of its events; comments and other fields are left out."""
    rest = b""
    async for chunk in chunks:
        *whole, rest = (rest + chunk).replace(b"\r\n", b"\n").split(b"\n\n")
        for one in whole:
            lines = [line[5:].removeprefix(b" ") for line in one.split(b"\n") if line.startswith(b"data:")]
            if lines:
                yield b"\n".join(lines)


class EventStream:
    """Sends events as they come. The status line goes out with the first, so an early error can still be a 4xx."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = False

    async def start(self) -> None:
        """Send the status line, unless it is sent."""
        if not self.started:
            self.started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": _HEADERS})

    async def raw(self, data: bytes, *, last: bool = False) -> None:
        """Send bytes that are events already."""
        await self.start()
        await self._send({"type": "http.response.body", "body": data, "more_body": not last})

    async def event(self, data: Any) -> None:
        """Send one JSON event."""
        await self.raw(event(data))

    async def done(self, before: bytes = b"") -> None:
        """Send what is left and ``[DONE]``, and end the answer."""
        await self.raw(before + DONE, last=True)

    async def fail(self, body: bytes) -> None:
        """Send an error event and end the answer without ``[DONE]``: clients raise on it."""
        await self.raw(b"data: " + body + b"\n\n", last=True)
