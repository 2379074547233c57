"""What a process holds, out of sight of others of the same user: Linux lets them read and trace it otherwise."""

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
    """Keep other processes of this user out of our memory, environment and open files; does nothing but on Linux.

    What is forked keeps to itself too; a program that is started does not. Root still can look, and so can whoever
    may trace any process.
    """
    _prctl(_DUMPABLE, 0)


def in_fresh_memory() -> None:
    """Keep to ourselves, and go on in a child, whose memory nobody has opened before; then end as it ended.

    Who has a process's memory open, or traces it, goes on with that when it keeps to itself. Call it before there are
    threads. Does nothing but on Linux.

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
        os._exit(1)  # it was ended before it could take us with it


def _tracer() -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith("TracerPid:")), 0)


def _end_as(child: int) -> NoReturn:
    """Hold nothing, wait for a child, and end as it ended."""
    os.closerange(3, 65_536)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 1)


def gain_nothing() -> None:
    """Gain no rights any more by starting programs such as ``sudo``, nor let what we start gain any (Linux)."""
    _prctl(_NO_NEW_PRIVILEGES, 1)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
