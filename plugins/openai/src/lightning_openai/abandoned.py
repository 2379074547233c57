"""Streams that nobody reads on: a thread of its own ends their spans.

That a stream is left shows when it is collected, and the collector runs wherever memory is asked for: in any thread,
under any lock, perhaps the sink's. So nothing is done there but to hand the call over.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Final

from lightning_spans.record.process import in_child, threads_live_on

_WAIT_S: Final = 1.0  # to end spans takes microseconds; whoever stops this ends the rest himself


class AbandonedStreams:
    """Calls whose bodies nobody reads any further."""

    def __init__(self) -> None:
        self._ends: SimpleQueue[Callable[[], object] | None] = SimpleQueue()  # its `put` may interrupt itself
        self._thread: threading.Thread | None = None
        in_child(self._begin_again)

    def start(self) -> None:
        """Begin to end what is handed over."""
        self._thread = threading.Thread(target=self._work, name="lightning-abandoned-streams", daemon=True)
        self._thread.start()

    def take(self, end: Callable[[], object]) -> None:
        """Take what ends the span of a call, without an error."""
        self._ends.put(end)

    def wait(self, timeout_s: float) -> bool:
        """Wait until all that was handed over is ended; False when the time ran out."""
        done = threading.Event()
        self._ends.put(done.set)
        return done.wait(timeout_s)

    def stop(self) -> None:
        """End what is left, and the thread."""
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
