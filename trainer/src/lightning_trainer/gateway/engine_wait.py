"""What a model call lost to an engine that could not sample: it was down, or its weights were replaced."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final


class EngineWait:
    """The wait of one call, summed over its answers.

    Attributes:
        seconds: waited so far.
        ended: whether the call failed because its engine ended.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.ended = False


_CURRENT: Final[ContextVar[EngineWait | None]] = ContextVar("engine_wait", default=None)


def measure_wait() -> EngineWait:
    """Return the wait of the call that this task answers; `add_wait` adds to it from now on."""
    wait = EngineWait()
    _CURRENT.set(wait)
    return wait


def add_wait(seconds: float) -> None:
    """Add to the wait of the current call, if it is measured."""
    if (wait := _CURRENT.get()) is not None:
        wait.seconds += seconds


def mark_ended(seconds: float) -> None:
    """Note that the current call fails because its engine has ended, and the time that it lost."""
    add_wait(seconds)
    if (wait := _CURRENT.get()) is not None:
        wait.ended = True


@contextmanager
def engine_wait() -> Iterator[None]:
    """Add the time that the block takes, also if the call is cut off within it."""
    since = time.monotonic()
    try:
        yield
    finally:
        add_wait(time.monotonic() - since)
