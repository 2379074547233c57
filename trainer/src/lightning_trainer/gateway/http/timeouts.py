"""How long a connection is waited for: clients that send or read slowly must not hold it for ever.

uvicorn waits without end for a request's head, keeps whatever head a client sends, and waits without end for a client
that does not read. Here each of these has a bound.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_S: Final = 15.0  # seconds for a request's line and headers, whole
HEAD_BYTES: Final = 64 * 1024
UNREAD_S: Final = 120.0  # seconds that an answer may wait for its client to read on


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with bounds. They are class attributes, so that a test can shorten them."""

    head_s: float = HEAD_S
    unread_s: float = UNREAD_S

    def connection_made(self, transport: Any) -> None:
        """Begin to wait for the first head."""
        self._head: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        super().connection_made(transport)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait for nothing any more."""
        for timer in (self._head, self._unread):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take bytes; close where they are too much of a head."""
        idle = self._idle()
        super().data_received(data)
        self._head_bytes = self._head_bytes + len(data) if idle and self._idle() else 0
        if self._head_bytes > HEAD_BYTES:
            self.transport.close()
        self._watch()

    def _idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _watch(self) -> None:
        """Return a head its time from the first byte on, or from the connection's start."""
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
        """The client reads more slowly than we write: begin to wait for it."""
        super().pause_writing()
        if self._unread is None:
            self._unread = self.loop.call_later(self.unread_s, self.transport.abort)

    def resume_writing(self) -> None:
        """It reads again."""
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None
