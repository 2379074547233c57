"""Sends answers, whole or as events, in the format of the surface on which they were requested."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from starlette.types import Send

from lightning_trainer.gateway.http.asgi import send_bytes
from lightning_trainer.gateway.http.errors import Refusal
from lightning_trainer.gateway.request.pending import PendingCall
from lightning_trainer.gateway.surfaces.surface import Exchange

_HEADERS: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies such as nginx would buffer the chunks
]


class ResponseSender:
    """Sends one answer. The status line is sent with the first event, so an early error can still be a 4xx."""

    def __init__(self, send: Send, exchange: Exchange, pending: PendingCall) -> None:
        self._send = send
        self._exchange = exchange
        self._pending = pending
        self.started = False

    async def whole(self, completion: dict[str, Any]) -> None:
        """Send a whole answer."""
        body = self._exchange.whole(self._pending, completion)
        self.started = True
        await send_bytes(self._send, body)

    async def chunk(self, chunk: dict[str, Any]) -> None:
        """Send a chunk of a stream."""
        await self.chunks([chunk])

    async def chunks(self, chunks: Sequence[dict[str, Any]]) -> None:
        """Send the chunks of a stream that arrived together."""
        if len(chunks) == 1:
            data = self._exchange.chunk(self._pending, chunks[0])
        else:
            data = b"".join([self._exchange.chunk(self._pending, chunk) for chunk in chunks])
        if data and self.started:
            await self._send({"type": "http.response.body", "body": data, "more_body": True})
        elif data:
            await self._events(data)

    async def last(self, chunks: Sequence[dict[str, Any]]) -> None:
        """Send the last chunks of a stream, which waited for the record, and end it."""
        data = b"".join(self._exchange.chunk(self._pending, chunk) for chunk in chunks)
        await self._events(data + self._exchange.end(self._pending), last=True)

    async def fail(self, refusal: Refusal) -> None:
        """End a stream that has begun with an error."""
        await self._events(self._exchange.failed(self._pending, refusal), last=True)

    async def _events(self, data: bytes, *, last: bool = False) -> None:
        if not self.started:
            self.started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        await self._send({"type": "http.response.body", "body": data, "more_body": not last})
