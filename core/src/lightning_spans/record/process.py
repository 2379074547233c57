"""Repairs in a forked child, and work at the end of a process.

In a forked child only the thread that forked exists, and locks stay held. With gevent all threads exist.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
import threading
from collections.abc import Callable
from multiprocessing import parent_process
from multiprocessing.util import Finalize, register_after_fork
from types import FrameType, MethodType
from typing import Any
from weakref import WeakKeyDictionary

_methods: WeakKeyDictionary[object, Callable[[Any], Any]] = WeakKeyDictionary()  # in the order of their registration


def in_child(function: Callable[[], Any]) -> None:
    """Call this in each forked child.

    A bound method is called as long as its object exists, which this does not keep alive.
    """
    if not hasattr(os, "register_at_fork"):
        return
    if isinstance(function, MethodType):
        _methods[function.__self__] = function.__func__
    else:
        os.register_at_fork(after_in_child=function)


def _call_methods() -> None:
    for owner, method in list(_methods.items()):
        method(owner)


in_child(_call_methods)


def threads_live_on() -> bool:
    """Whether a forked child has its parent's threads: gevent's are greenlets of the one thread that forks."""
    monkey = sys.modules.get("gevent.monkey")
    return monkey is not None and bool(monkey.is_module_patched("threading"))


def thread_frames() -> dict[int, FrameType]:
    """Return the current frame of each thread, by its identifier.

    Garbage collection is off meanwhile: on Python 3.11.7, among others, the process hangs if an object that lets other
    threads run, such as a socket, is finalised within `sys._current_frames` (CPython issue 106883).
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()  # the only way to see another thread's stack
    finally:
        if collects:
            gc.enable()


def at_end(owner: object, function: Callable[[], Any]) -> Callable[[], None]:
    """Call this when the process ends, also in a multiprocessing worker, which ends without `atexit`.

    Args:
        owner: a worker that is forked after the owner is gone does not call the function.
        function: called last, in every process that has it.

    Returns:
        The undo, for this process.
    """

    def with_worker(_: object) -> None:
        Finalize(None, function, exitpriority=-100)

    atexit.register(function)
    if parent_process() is not None:
        with_worker(owner)
    register_after_fork(owner, with_worker)
    return lambda: atexit.unregister(function)


def within(timeout_s: float, function: Callable[[], Any]) -> bool:
    """Call a function, and wait at most this long for it. False: it takes longer, and continues in a thread."""
    thread = threading.Thread(target=function, name="lightning-waits", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # at the end of the process, since Python 3.12
        function()
        return True
    thread.join(timeout_s)
    return not thread.is_alive()
