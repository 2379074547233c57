"""Programs in separate threads; their errors and hang-ups fail the test."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Final

from lightning_spans.record.process import thread_frames

STANDS_S: Final = 45.0  # less than the minute after which model clients give up or retry
ENDED_S: Final = 300.0  # for a busy machine


def at_once(programs: Sequence[Callable[[], object]], *, stands_s: float = STANDS_S, within_s: float = ENDED_S) -> None:
    """Run programs at the same time, each in a thread, and wait for all of them.

    Args:
        programs: the functions to run.
        stands_s: seconds after which the stack of each thread of the process is noted, for the error's text.
        within_s: seconds more until the last one must have ended.

    Raises:
        AssertionError: one has not ended by then.
        BaseExceptionGroup: the exceptions of the programs.
    """
    failed: list[BaseException] = []

    def guarded(program: Callable[[], object]) -> None:
        try:
            program()
        except BaseException as error:  # noqa: BLE001 - raised again in the test's own thread
            failed.append(error)

    threads = [
        threading.Thread(target=guarded, args=(program,), name=f"program {number}", daemon=True)
        for number, program in enumerate(programs)
    ]
    for thread in threads:
        thread.start()
    stood = "" if _join_all(threads, stands_s) else f"after {stands_s:g} s they stood here:\n{stacks()}"
    if not _join_all(threads, within_s):
        standing = ", ".join(thread.name for thread in threads if thread.is_alive())
        raise AssertionError(f"{standing} did not end; {stood}")
    if failed:
        error = BaseExceptionGroup("programs failed in their threads", failed)
        error.add_note(stood)
        raise error


def _join_all(threads: Sequence[threading.Thread], within_s: float) -> bool:
    until = time.monotonic() + within_s
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)


def stacks() -> str:
    """Return the stack of each thread of this process."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = thread_frames().items()
    return "\n".join(
        f"--- {names.get(ident, ident)}\n{''.join(traceback.format_stack(frame))}" for ident, frame in frames
    )
