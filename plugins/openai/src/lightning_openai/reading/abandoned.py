"""Abandoned streams: a separate thread ends their spans.

A stream turns out to be abandoned when it is garbage collected, which can happen on any allocation: in any thread,
under any lock, perhaps the sink's. So the collector only hands the call over to the thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Final

from lightning_spans.record.process import in_child, threads_live_on

_WAIT_S: Final = 1.0  # ending spans takes microseconds; whoever stops this object ends the rest itself


class AbandonedStreams:
    """Calls whose answers nobody reads the rest."""

    def __init__(self) -> None:
        self._ends: SimpleQueue[Callable[[], object] | None] = SimpleQueue()  # its `put` may interrupt itself
        self._thread: threading.Thread | None = None
        in_child(self._begin_again)

    def start(self) -> None:
        """Start the thread that ends the calls which are handed over."""
        self._thread = threading.Thread(target=self._work, name="lightning-abandoned-streams", daemon=True)
        self._thread.start()

    def take(self, end: Callable[[], object]) -> None:
        """Take the function that ends a call's span. Never raises."""
        self._ends.put(end)

    def wait(self, timeout_s: float) -> bool:
        """Wait until every call that was handed over has ended; False if the time ran out."""
        done = threading.Event()
        self._ends.put(done.set)
        return done.wait(timeout_s)

    def stop(self) -> None:
        """End the remaining calls and the thread."""
        if self._thread is not None:
            self._ends.put(None)
            self._thread.join(_WAIT_S)
            self._thread = None

    def _begin_again(self) -> None:
        if self._thread is not None and not threads_live_on():
            self.start()

    def _work(self) -> None:
        while (end := self._ends.get()) is not None:
            end()


abandoned: Final = AbandonedStreams()
