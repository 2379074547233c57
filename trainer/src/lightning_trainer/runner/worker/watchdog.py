"""Heartbeats from inside a worker.

A thread notices when the event loop is blocked, and reports which attempt blocks it.
"""

from __future__ import annotations

import asyncio
import json
import os
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from lightning_spans.record.process import thread_frames

LOOK_S: Final = 0.25
STILL_S: Final = 1.0  # a loop that has not run for this long is reported

_OURS: Final = ("attempt", "asyncio_", "lightning", "MainThread")  # prefixes of the names of our own threads


_LIBRARIES: Final = tuple(
    {f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)


class LoopBlock(NamedTuple):
    """A time in which the event loop did not run.

    Attributes:
        until: when it ended, by `time.monotonic`; while it lasts, when it was last seen.
        where: the place in the program that held the loop.
    """

    until: float
    where: str


_LAST: list[LoopBlock] = []  # the last one of this process


def block_since(began: float) -> LoopBlock | None:
    """Return the last block of this process's event loop, if it ended after this time."""
    return _LAST[-1] if _LAST and _LAST[-1].until >= began else None


class LoopWatch:
    """Watches the loop of the thread that creates it, and writes its state into a pipe, one JSON object a line.

    It writes null as long as all is well; if nothing comes, a call lets no thread of the process run.

    Args:
        pipe: file descriptor.
        number_of: returns the number of the attempt that a task belongs to; None if it belongs to none.
    """

    def __init__(self, pipe: int, number_of: Callable[[asyncio.Task[object]], int | None]) -> None:
        self._pipe = pipe
        self._number_of = number_of
        self._loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()
        self._native_id = threading.get_native_id()
        self._answered = threading.Event()
        self._closing = threading.Event()
        self._tell(None)  # before any attempt can silence us
        threading.Thread(target=self._run, name="lightning-alive", daemon=True).start()

    def close(self) -> None:
        """Stop watching."""
        self._closing.set()

    def _run(self) -> None:
        while not self._closing.wait(LOOK_S):
            self._answered.clear()
            asked, starved_s = time.monotonic(), core_wait_s(self._native_id)
            try:
                self._loop.call_soon_threadsafe(self._answered.set)
            except RuntimeError:
                return  # the loop is closed
            if not self._answered.wait(STILL_S):
                while not self._answered.wait(LOOK_S) and not self._closing.is_set():
                    now, where = time.monotonic(), self._where()
                    _LAST[:] = [LoopBlock(now, where)]
                    without_core_s = core_wait_s(self._native_id) - starved_s  # no fault of the program
                    seconds = now - asked - without_core_s
                    self._tell({"number": self._holder(), "seconds": seconds, "where": where})
            self._tell(None)

    def _holder(self) -> int | None:
        task = asyncio.current_task(self._loop)
        return None if task is None else self._number_of(task)

    def _where(self) -> str:
        frame = thread_frames().get(self._thread_id)
        if frame is None:
            return "an unknown place"
        frames = traceback.extract_stack(frame)
        own = [each for each in frames if not each.filename.startswith((*_LIBRARIES, "<"))]
        last = (own or frames)[-1]  # the program's line is what its author can change, not the library's that waits
        return f"{last.filename}:{last.lineno} in {last.name}"

    def _tell(self, blocking: dict[str, object] | None) -> None:
        try:
            os.write(self._pipe, json.dumps(blocking).encode() + b"\n")
        except OSError:
            self._closing.set()  # the runner has ended


def core_wait_s(thread: int) -> float:
    """Return for how long a thread of this process has waited for a free core since it began; 0 where that is unknown.

    Args:
        thread: its number in the system, as of `threading.get_native_id`.
    """
    try:
        return int(Path(f"/proc/self/task/{thread}/schedstat").read_bytes().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):  # not Linux, or a kernel that does not count it
        return 0.0


def leaked_threads() -> int:
    """Return the number of threads of this process that neither Python's main program nor we have started."""
    return sum(not thread.name.startswith(_OURS) for thread in threading.enumerate())
