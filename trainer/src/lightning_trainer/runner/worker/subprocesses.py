"""Processes that agents start: each carries a mark of its attempt, and is ended with it.

Workers are shared, so the processes of an attempt are recognised by their environment, which their own children
inherit. What was started while the agent was imported has no mark, and is there for all attempts.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import inspect
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any, Final

import psutil

WORKER: Final = "LIGHTNING_WORKER"  # in the environment of a worker, and of all that is started in it
_ATTEMPT: Final = "LIGHTNING_WORKER_ATTEMPT"  # of all that one attempt started
_GRACE_S: Final = 1.0  # between the request to end and the kill
_LOOK_S: Final = 0.02
_UNCLAIMED_S: Final = 10.0  # time after which nothing else will wait for a child process of ours that has ended
_SUBREAPER: Final = 36  # PR_SET_CHILD_SUBREAPER of Linux


class Subprocesses:
    """The processes that the attempts of this process started. `watch` begins to mark them.

    Args:
        current: returns the number of the current attempt; None outside of attempts.
    """

    def __init__(self, current: Callable[[], int | None]) -> None:
        self._current = current
        self._starting: set[int] = set()  # attempts that have started a process
        self._own: set[int] = set()  # processes whose end is waited for in this process
        self._ended: dict[int, float] = {}  # ended orphans that became our children, and when they were first seen

    def watch(self) -> None:
        """Mark what is started from now on, and become the parent of those whose own parent ends (Linux)."""
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
        plain: Callable[..., None] = subprocess.Popen.__init__
        signature = inspect.signature(plain)

        @functools.wraps(plain)
        def start(popen: Any, *args: Any, **options: Any) -> None:
            number = self._current()
            if number is None:
                return plain(popen, *args, **options)
            bound = signature.bind(popen, *args, **options)
            given = bound.arguments.get("env")
            bound.arguments["env"] = {**(os.environ if given is None else given), _ATTEMPT: _mark(number)}
            self._starting.add(number)
            plain(*bound.args, **bound.kwargs)
            self._own.add(popen.pid)
            return None

        setattr(subprocess.Popen, "__init__", start)  # noqa: B010 - mypy knows its overloads

    def end(self, number: int) -> list[str]:
        """End what an attempt left running, with all that this started, and return the names.

        Waits until it has ended, about a second at most.
        """
        if number not in self._starting:
            return []
        self._starting.discard(number)
        children = psutil.Process().children(recursive=True)
        left = [process for process in children if _has(process, _ATTEMPT, _mark(number))]
        names = [_name(process) for process in left]
        _end(left)
        for process in left:
            if process.pid not in self._own:
                _reap(process.pid)
        self._clear(children)
        return names

    def _clear(self, children: Iterable[psutil.Process]) -> None:
        """Reap ended processes that nobody here started: they stay in the system's table until we wait for them."""
        there = {process.pid: process for process in children}
        self._own &= there.keys()
        now = time.monotonic()
        orphans = [pid for pid, process in there.items() if pid not in self._own and _has_ended(process)]
        self._ended = {pid: self._ended.get(pid, now) for pid in orphans}
        for pid in [pid for pid, seen in self._ended.items() if now - seen > _UNCLAIMED_S]:
            _reap(pid)


def end_of_worker(name: str) -> None:
    """Kill at once what is left of a worker, whichever process is its parent now.

    Args:
        name: the worker's `WORKER`, which is the last word of its command line too: what it forked hides its
            environment.
    """
    for process in psutil.process_iter():
        if process.pid != os.getpid() and (_has(process, WORKER, name) or _last_word(process) == name):
            with contextlib.suppress(psutil.Error):
                process.kill()


def _mark(number: int) -> str:
    return f"{os.environ.get(WORKER, os.getpid())}/{number}"


def _has(process: psutil.Process, variable: str, value: str) -> bool:
    try:
        return bool(process.environ().get(variable) == value)
    except (psutil.Error, OSError):  # another user's, or ended meanwhile
        return False


def _last_word(process: psutil.Process) -> str | None:
    try:
        return next(iter(reversed(process.cmdline())), None)
    except (psutil.Error, OSError):
        return None


def _name(process: psutil.Process) -> str:
    try:
        return str(process.name())
    except psutil.Error:
        return str(process.pid)


def _end(processes: list[psutil.Process]) -> None:
    """Ask processes to end, and kill those that do not."""
    for ask in (psutil.Process.terminate, psutil.Process.kill):
        for process in processes:
            with contextlib.suppress(psutil.Error):
                ask(process)
        until = time.monotonic() + _GRACE_S
        while time.monotonic() < until and not all(map(_has_ended, processes)):
            time.sleep(_LOOK_S)


def _has_ended(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return True


def _reap(pid: int) -> None:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
