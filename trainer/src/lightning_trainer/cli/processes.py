"""Hides a runner's key from other processes: it is neither in its environment nor in its command line."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Final

_PASSED: Final = "LIGHTNING_KEY_FD"


def hide_key(arguments: Sequence[str]) -> None:
    """Restart this program without anything that leads to its key, which is passed through a pipe.

    Every process of the machine can read a command line, and agents are child processes of the runner. Does nothing if
    neither ``--key-file`` nor ``LIGHTNING_KEY`` is set.

    Args:
        arguments: of the program, as in `sys.orig_argv`.
    """
    kept, file = _without_key_file(arguments)
    key = os.environ.get("LIGHTNING_KEY")
    if (file is None and key is None) or os.name != "posix":
        return
    reading, writing = os.pipe()
    os.write(writing, json.dumps({"key_file": file, "key": key}).encode())
    os.close(writing)
    os.set_inheritable(reading, True)  # noqa: FBT003 - the system call's only form
    environment = {name: value for name, value in os.environ.items() if name != "LIGHTNING_KEY"}
    os.execve(sys.executable, kept, {**environment, _PASSED: str(reading)})  # noqa: S606 - ourselves


def handed_over() -> dict[str, str | None]:
    """Return ``key_file`` and ``key`` as passed by `hide_key`; empty if it passed none."""
    number = os.environ.pop(_PASSED, None)
    if number is None:
        return {}
    with os.fdopen(int(number), "rb") as pipe:
        found: dict[str, str | None] = json.loads(pipe.read())
    return found


def _without_key_file(arguments: Sequence[str]) -> tuple[list[str], str | None]:
    kept: list[str] = []
    file, follows = None, False
    for one in arguments:
        if follows:
            file, follows = one, False
        elif one == "--key-file":
            follows = True
        elif one.startswith("--key-file="):
            file = one.partition("=")[2]
        else:
            kept.append(one)
    return kept, file
