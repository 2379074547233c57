"""Programs in disguise, run in a process of their own: JSON schemas and regular expressions that others wrote.

A schema may refer to itself without end, and a pattern may try ways without number, so each check has an amount of
processor time and memory. The process fetches nothing. This file is run as a script there and imports nothing of ours.
"""

from __future__ import annotations

import atexit
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import IO, Any, Final

CPU_S: Final = 2.0  # of one check
_MEMORY: Final = 2 << 30
_MOST_ENDED: Final = 3  # checks of one attempt that may take too long; after that nothing of it is checked


class TooLongError(Exception):
    """A check took more processor time or memory than it may."""


class Checks:
    """The checks of one attempt. After the third that takes too long, no more are made."""

    def __init__(self) -> None:
        self._ended = 0

    def fits(self, value: Any, schema: Any) -> bool:
        """Whether a value fits a JSON schema. Nothing fits what is no schema, can't be resolved or takes too long."""
        return self._holds({"schema": schema, "value": value})

    def found(self, pattern: str, text: str) -> bool:
        """Whether a regular expression is found in a text. A search that takes too long finds nothing."""
        return self._holds({"pattern": pattern, "text": text})

    def _holds(self, question: dict[str, Any]) -> bool:
        if self._ended >= _MOST_ENDED:
            return False
        try:
            return _CHECKER.ask(question)
        except TooLongError:
            self._ended += 1
            return False


class _Checker:
    """A process that checks, begun when it is first needed, and again where a check has ended it."""

    def __init__(self) -> None:
        self._lock, self._process = Lock(), None  # type: tuple[Lock, subprocess.Popen[bytes] | None]

    def ask(self, question: dict[str, Any]) -> bool:
        """Return the answer to one question.

        Raises:
            TooLongError: it took too long, and ended the process.
        """
        with self._lock:
            process = self._process = self._process or _start()
            with suppress(BrokenPipeError):
                _pipe(process.stdin).write(json.dumps(question).encode() + b"\n")
                _pipe(process.stdin).flush()
            answer = _pipe(process.stdout).readline()
            if answer:
                return answer == b"1\n"
            self._end()
            status = process.returncode
        if status not in (-signal.SIGPROF, -signal.SIGKILL, -signal.SIGSEGV):
            raise RuntimeError(f"the process that checks schemas and patterns ended with status {status}")
        raise TooLongError

    def _end(self) -> None:
        if self._process is not None:
            with suppress(BrokenPipeError):
                self._process.communicate()
            self._process = None

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._end()


_CHECKER: Final = _Checker()
atexit.register(_CHECKER.close)


def _start() -> subprocess.Popen[bytes]:
    words = [sys.executable, "-P", str(Path(__file__)), str(CPU_S)]
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # noqa: S603 - our own words


def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
    if stream is None:
        raise AssertionError("it was started with pipes")
    return stream


def _main() -> None:
    """Answer the questions on stdin, each in its time."""
    import resource

    answers, limit = _answers_with(), float(sys.argv[1])
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: whoever asks decides
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, limit)  # its signal ends a process, also one inside a regular expression
        answer = any(answers(line))
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write("1\n" if answer else "0\n")
        sys.stdout.flush()


def _answers_with() -> Callable[[bytes], Iterator[bool]]:
    """Import what checks, which is no part of a check's time."""
    import re

    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import validator_for
    from jsonschema_specifications import REGISTRY  # type: ignore[import-untyped]
    from referencing.exceptions import Unresolvable

    def answers(line: bytes) -> Iterator[bool]:
        with suppress(SchemaError, Unresolvable, RecursionError, MemoryError, re.error, OverflowError, ValueError):
            question = json.loads(line)
            if "pattern" in question:
                yield re.search(question["pattern"], question["text"]) is not None
                return
            schema = question["schema"]
            chosen = validator_for(schema, default=Draft202012Validator)
            chosen.check_schema(schema)
            yield chosen(schema, registry=REGISTRY).is_valid(question["value"])

    return answers


if __name__ == "__main__":
    _main()
