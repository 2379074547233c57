"""What a process holds, out of sight of others of the same user: Linux lets them read and trace it otherwise."""

from __future__ import annotations

import sys
from typing import Final

_DUMPABLE: Final = 4  # PR_SET_DUMPABLE of <sys/prctl.h>
_NO_NEW_PRIVILEGES: Final = 38  # PR_SET_NO_NEW_PRIVS


def keep_to_ourselves() -> None:
    """Keep other processes of this user out of our memory, environment and open files; does nothing but on Linux.

    What is forked keeps to itself too; a program that is started does not. Root still can look, and so can whoever
    may trace any process.
    """
    _prctl(_DUMPABLE, 0)


def gain_nothing() -> None:
    """Gain no rights any more by starting programs such as ``sudo``, nor let what we start gain any (Linux)."""
    _prctl(_NO_NEW_PRIVILEGES, 1)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
