"""Run a command and everything that it starts until it ends, or until the process that started this one has ended.

Run as a program, with the command as arguments. It imports nothing of ours. Its standard input is a pipe whose other
end is held by the starter: when that end closes, also after SIGKILL, the command is ended.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading

_PATIENCE_S = 20.0


def _kill(number: int, child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, number)


def _end_with_starter(child: subprocess.Popen[bytes]) -> None:
    while os.read(0, 4096):
        pass
    _kill(signal.SIGTERM, child)
    try:
        child.wait(_PATIENCE_S)
    except subprocess.TimeoutExpired:
        _kill(signal.SIGKILL, child)


def main() -> int:
    """Run the command and return its exit status."""
    child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True)  # noqa: S603 - what it is for
    threading.Thread(target=_end_with_starter, args=(child,), daemon=True).start()
    status = child.wait()
    _kill(signal.SIGKILL, child)  # workers that outlived it
    return abs(status)


if __name__ == "__main__":
    sys.exit(main())
