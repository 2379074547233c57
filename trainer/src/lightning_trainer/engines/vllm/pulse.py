"""For how long servers that work on requests have sent nothing: one that hangs neither ends nor breaks a connection."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from lightning_trainer.gateway.engine import add_wait

_HANGS_S: Final = 10.0  # without a byte of any answer; servers that work send tokens all the time


class Pulse:
    """A clock that runs while a request is in progress, and is set back whenever something arrives.

    It stands still between requests, so a server that hangs is also found if each request is given up after a while.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests = 0
        self._before_s, self._since = 0.0, 0.0  # what was counted until then, and when the clock started

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count a request as being in progress within the block."""
        with self._lock:
            if not self._requests:
                self._since = time.monotonic()
            self._requests += 1
        try:
            yield
        finally:
            with self._lock:
                self._requests -= 1
                if not self._requests:
                    self._before_s += time.monotonic() - self._since

    def beat(self) -> None:
        """Note that something arrived, or that the server was started again."""
        with self._lock:
            self._before_s, self._since = 0.0, time.monotonic()

    @property
    def silent_s(self) -> float:
        """Seconds without a sign of life, of those in which requests were in progress."""
        with self._lock:
            return self._before_s + (time.monotonic() - self._since if self._requests else 0.0)

    @contextmanager
    def noted_if_cut(self) -> Iterator[None]:
        """If the block, a call, is cut while the servers hang, count that as the call's wait for its engine."""
        since = time.monotonic()
        try:
            yield
        except (GeneratorExit, asyncio.CancelledError):
            silent_s = min(self.silent_s, time.monotonic() - since)
            if silent_s >= _HANGS_S:
                add_wait(silent_s)
            raise

    @property
    def requests(self) -> int:
        """Requests in progress."""
        return self._requests
