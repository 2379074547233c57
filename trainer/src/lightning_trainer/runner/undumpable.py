"""Protection of a process from others of the same user: by default, Linux lets them read and trace it."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import Final, NoReturn

from lightning_spans.errors import ConfigError

_DEATH_SIGNAL: Final = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>
_DUMPABLE: Final = 4  # PR_SET_DUMPABLE
_NO_NEW_PRIVILEGES: Final = 38  # PR_SET_NO_NEW_PRIVS


def keep_to_ourselves() -> None:
    """Keep other processes of this user out of our memory, environment and open files; does nothing except on Linux.

    Forked children are protected too; a program that is started is not. Root still has access, and so has any process
    that may trace all others.
    """
    _prctl(_DUMPABLE, 0)


def in_fresh_memory() -> None:
    """Protect this process, and continue in a child, whose memory nobody has opened yet; then end as the child ended.

    A process that already has this one's memory open, or traces it, would keep that access. Call it before there are
    threads. Does nothing except on Linux.

    Raises:
        ConfigError: this process is being traced.
    """
    if sys.platform != "linux":
        return
    keep_to_ourselves()
    if tracer := _tracer():
        raise ConfigError(f"process {tracer} traces this worker, so that it can't keep attempts apart: end it.")
    ours = os.getpid()
    child = os.fork()
    if child:
        _end_as(child)
    _prctl(_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != ours:
        os._exit(1)  # the parent ended before its end could kill this process


def _tracer() -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith("TracerPid:")), 0)


def _end_as(child: int) -> NoReturn:
    """Close all files but the standard streams, wait for a child, and end as it ended."""
    os.closerange(3, 65_536)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 1)


def gain_nothing() -> None:
    """Prevent this process and what it starts from gaining rights through programs such as ``sudo`` (Linux)."""
    _prctl(_NO_NEW_PRIVILEGES, 1)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
