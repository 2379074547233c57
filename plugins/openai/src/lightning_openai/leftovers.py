"""Streams that nobody reads on: a thread of its own ends their spans.

That a stream is left shows when it is collected, and the collector runs wherever memory is asked for: in any thread,
under any lock, perhaps the sink's. So nothing is done there but to hand the call over.
"""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final

from lightning_spans.forks import in_child

if TYPE_CHECKING:
    from lightning_openai.call import Call

_WAIT_S: Final = 1.0  # to end spans takes microseconds; whoever stops this ends the rest himself


class Leftovers:
    """Calls whose bodies nobody reads any further."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Call | threading.Event | None] = SimpleQueue()  # its `put` may interrupt itself
        self._thread: threading.Thread | None = None
        in_child(self._begin_again)

    def start(self) -> None:
        """Begin to end what is handed over."""
        self._thread = threading.Thread(target=self._work, name="lightning-wire", daemon=True)
        self._thread.start()

    def take(self, call: Call) -> None:
        """Take a call whose span is to be ended."""
        self._calls.put(call)

    def wait(self, timeout_s: float) -> bool:
        """Wait until all that was handed over is ended; False when the time ran out."""
        done = threading.Event()
        self._calls.put(done)
        return done.wait(timeout_s)

    def stop(self) -> None:
        """End what is left, and the thread."""
        if self._thread is not None:
            self._calls.put(None)
            self._thread.join(_WAIT_S)
            self._thread = None

    def _begin_again(self) -> None:
        if self._thread is not None:  # a thread does not live on in a forked child
            self.start()

    def _work(self) -> None:
        while (item := self._calls.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
            else:
                item.end_left()


leftovers: Final = Leftovers()
