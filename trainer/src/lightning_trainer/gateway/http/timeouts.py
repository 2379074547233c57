"""Time limits for connections: clients that send or read slowly must not hold one for ever.

uvicorn waits without limit for a request's head, keeps whatever heads, trailers and further requests a client sends,
and waits without limit for a client that does not read. Here each of these has a bound.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_S: Final = 15.0  # seconds for a request's whole line and headers
HEAD_BYTES: Final = 64 * 1024  # bytes of a head, and of the trailers after a body
PIPELINED: Final = 16  # requests that may wait behind an unanswered one; clients of today send none
# bytes of a body that is read and dropped, so that its sender gets to the response
LATE_BYTES: Final = 64 * 1024 * 1024
UNREAD_S: Final = 120.0  # seconds that a response may wait for its client to read on


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with bounds. They are class attributes, so that a test can shorten them."""

    head_s: float = HEAD_S
    unread_s: float = UNREAD_S

    def connection_made(self, transport: Any) -> None:
        """Start to wait for the first head."""
        self._head: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._loose_bytes = self._late_bytes = 0
        self._moved = False
        super().connection_made(transport)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        for timer in (self._head, self._unread):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Receive bytes. Close the connection if a head is too long, whether or not a response is in progress."""
        self._moved = False
        super().data_received(data)
        self._loose_bytes = 0 if self._moved else self._loose_bytes + len(data)
        if self._loose_bytes > HEAD_BYTES or self._late_bytes > LATE_BYTES:
            self.transport.close()
        self._watch()

    def on_headers_complete(self) -> None:
        """A head is complete: start the request, unless too many wait before it."""
        if len(self.pipeline) >= PIPELINED:
            raise ValueError("too many concurrent requests on one connection")  # the parser takes nothing more
        self._moved = True
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Receive bytes of a body.

        After the response they are read and dropped, otherwise the response would be lost too.
        """
        self._moved = True
        self._late_bytes = self._late_bytes + len(body) if self._idle() else 0
        super().on_body(body)

    def send_400_response(self, msg: str) -> None:
        """Reject what is not valid HTTP; silently if the response would be in the middle of another one."""
        if self.transport.is_closing():
            return
        if self.pipeline or (not self._idle() and self.cycle.response_started):
            self.transport.close()
        else:
            super().send_400_response(msg)

    def _idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _watch(self) -> None:
        """Start the time limit of a head, at its first byte or at the connection's start."""
        if not self._idle():
            if self._head is not None:
                self._head.cancel()
                self._head = None
        elif self._head is None:
            self._head = self.loop.call_later(self.head_s, self._give_up)

    def _give_up(self) -> None:
        self._head = None
        if self._idle() and not self.transport.is_closing():
            self.transport.close()

    def pause_writing(self) -> None:
        """The client reads more slowly than we write: start to wait for it."""
        super().pause_writing()
        if self._unread is None:
            self._unread = self.loop.call_later(self.unread_s, self.transport.abort)

    def resume_writing(self) -> None:
        """The client reads again."""
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None
