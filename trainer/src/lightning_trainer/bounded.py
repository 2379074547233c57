"""A process for one kind of third-party program, with limits of processor time and memory for each question."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import IO, Final

_LIMITS: Final = (-signal.SIGPROF, -signal.SIGKILL, -signal.SIGSEGV, -signal.SIGABRT) if sys.platform != "win32" else ()


class TooLongError(Exception):
    """A question needed more processor time or memory than allowed."""


class BoundedProcess:
    """Answers questions, one line each way. It is started on first use, and again after a question has ended it.

    Args:
        script: calls `answer_lines`; it is run by its path, so that nothing else of this package is loaded.
        words: its arguments.
    """

    def __init__(self, script: Path, *words: str) -> None:
        self._words = [sys.executable, "-P", str(script), *words]
        self._lock, self._process = Lock(), None  # type: tuple[Lock, subprocess.Popen[bytes] | None]
        atexit.register(self.close)

    def ask(self, question: bytes) -> bytes:
        """Return the answer to one question, both without line breaks.

        Raises:
            TooLongError: it took too long, and ended the process.
            RuntimeError: the process ended for another reason.
        """
        with self._lock:
            process = self._process = self._process or self._start()
            with suppress(BrokenPipeError):
                _pipe(process.stdin).write(question + b"\n")
                _pipe(process.stdin).flush()
            answer = _pipe(process.stdout).readline()
            if answer.endswith(b"\n"):
                return answer[:-1]
            self._end()
        if process.returncode not in _LIMITS:
            raise RuntimeError(f"{Path(self._words[2]).name} ended with status {process.returncode}")
        raise TooLongError

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._end()

    def _start(self) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "USE_TORCH": "0"}  # transformers would import torch, which takes seconds
        pipe = subprocess.PIPE
        return subprocess.Popen(self._words, stdin=pipe, stdout=pipe, env=environment)  # noqa: S603 - our own words

    def _end(self) -> None:
        if self._process is not None:
            with suppress(BrokenPipeError):
                self._process.communicate()
            self._process = None


def answer_lines(answer: Callable[[bytes], bytes], cpu_s: Callable[[bytes], float], memory: int) -> None:
    """Answer the questions on stdin, each within its time. This is the process of a `BoundedProcess`.

    Args:
        answer: returns the answer to a question, without a line break.
        cpu_s: returns the processor time of a question.
        memory: most bytes of address space.
    """
    import resource

    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # from a terminal: the parent process decides
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, cpu_s(line))  # its signal ends a process even inside a C function
        answered = answer(line)
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(answered + b"\n")
        sys.stdout.buffer.flush()


def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
    if stream is None:
        raise AssertionError("it was started with pipes")
    return stream
