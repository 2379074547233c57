"""Ctrl-C and SIGTERM, handled at chosen moments: never in the middle of an update."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class SavedInterrupt(KeyboardInterrupt):
    """Somebody asked the program to stop, and it has saved its work."""


@contextmanager
def defer_interrupts(tell: Callable[[], None]) -> Iterator[Callable[[], None]]:
    """Defer Ctrl-C and SIGTERM within the block; a second one ends the program at once.

    Outside the main thread nothing is deferred, because Python delivers signals only to the main thread.

    Args:
        tell: called at once for the first signal, to say what is awaited.

    Yields:
        A function that raises `SavedInterrupt` once there was a signal.
    """
    asked = threading.Event()

    def check() -> None:
        if asked.is_set():
            raise SavedInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield check
        return

    def hear(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - the signature of a signal handler
        asked.set()
        restore()
        tell()

    before = {number: signal.signal(number, hear) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    try:
        yield check
    finally:
        restore()
