"""Run a command and everything that it starts until it ends, or until the process that started this one has ended.

Run as a program, with the command as arguments. It imports nothing of ours. Its standard input is a pipe whose other
end is held by the starter: when that end closes, also after SIGKILL, the command is ended. All of it is one process
group, so the starter can end it also if this process hangs.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading

_PATIENCE_S = 20.0


def _end_with_starter(child: subprocess.Popen[bytes]) -> None:
    while os.read(0, 4096):
        pass
    os.killpg(0, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(_PATIENCE_S)
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    """Run the command in this process's group, which ends with it."""
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)  # noqa: S603 - what it is for
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # sent to the group below; the command has its own handler
    threading.Thread(target=_end_with_starter, args=(child,), daemon=True).start()
    child.wait()
    os.killpg(0, signal.SIGKILL)  # workers that outlived it, and this process


if __name__ == "__main__":
    main()
