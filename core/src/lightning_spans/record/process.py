"""What is put right in a forked child, and what is done at the end of a process.

In a forked child no thread lives on but the one that forked, and locks stay held. With gevent they all do.
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

_methods: WeakKeyDictionary[object, Callable[[Any], Any]] = WeakKeyDictionary()  # in the order in which they came


def in_child(function: Callable[[], Any]) -> None:
    """Call this in each forked child; of an object, one method, as long as it lives: it is not kept alive for it."""
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
    """Return where each thread stands, by its identifier.

    Without garbage collection meanwhile: on Python 3.11.7, among others, the process stops for good if an object that
    lets other threads run, such as a socket, is finalised inside of `sys._current_frames` (CPython's issue 106883).
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()  # the only way to see another thread's stack
    finally:
        if collects:
            gc.enable()


def at_end(owner: object, function: Callable[[], Any]) -> Callable[[], None]:
    """Call this when the process ends, also a worker of multiprocessing, which ends without `atexit`.

    Args:
        owner: no worker that is forked when it is gone calls the function.
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
    """Call a function, and wait no longer than that for it. False: it takes longer, and goes on in a thread."""
    thread = threading.Thread(target=function, name="lightning-waits", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # at the end of the process, since Python 3.12
        function()
        return True
    thread.join(timeout_s)
    return not thread.is_alive()
