"""Workers of a runner, forked from one process that has imported what programs of tests import.

A worker that is started anew takes a second of CPU to import the openai client, and most tests of runs are about
something else. The tests of the runner itself start their workers as the runner does.
"""

from __future__ import annotations

import asyncio
import atexit
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

_IMPORTED = ("lightning_trainer.runner.worker.__main__", "lightning_openai.plugin", "lightning_openai.patch")
_LONGEST = 2**17  # bytes of a request: the environment is most of it


class ForkedWorker:
    """What the runner needs of a worker's process: its number, and its exit status once it has ended."""

    def __init__(self, pid: int, status: asyncio.StreamReader) -> None:
        self.pid = pid
        self._ended = asyncio.ensure_future(status.readline())

    async def wait(self) -> int:
        """Wait for the end of the process and return its exit status."""
        return int(await asyncio.shield(self._ended))


class WarmWorkers:
    """The process that workers are forked from, started with the first. Close it at the end."""

    def __init__(self) -> None:
        self._line: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def _connected(self) -> socket.socket:
        if self._line is None:
            self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                words = [sys.executable, "-m", "support.warm_workers", str(theirs.fileno())]
                folder = Path(__file__).parents[1]
                # in a session of its own: a signal to the group of a test is not for it
                self._process = subprocess.Popen(words, cwd=folder, pass_fds=[theirs.fileno()], start_new_session=True)
        return self._line

    def close(self) -> None:
        """End the process; workers that were forked from it live on."""
        if self._line is not None and self._process is not None:
            self._line.close()
            self._process.wait()

    async def start(
        self, log: Path, environment: Mapping[str, str], words: Sequence[str], own: Mapping[str, Any]
    ) -> tuple[ForkedWorker, socket.socket, int]:
        """Do what the runner's `_start_process` does."""
        from lightning_trainer.runner.process import _open_log

        assert not own, "a worker with a user of its own is no fork of ours"
        ours, theirs = socket.socketpair()
        signs, told = os.pipe()
        status, ending = os.pipe()
        asked = json.dumps([os.getcwd(), dict(environment), list(words)]).encode()  # noqa: PTH109 - as text
        with ExitStack() as undo:
            undo.enter_context(theirs)
            undo.callback(os.close, told)
            undo.callback(os.close, ending)
            output = undo.enter_context(_open_log(log))
            fds = [theirs.fileno(), told, output.fileno(), ending]
            try:
                socket.send_fds(self._connected(), [asked], fds)
            except BrokenPipeError:  # a test has ended it: another takes its place
                self.close()
                self._line = None
                socket.send_fds(self._connected(), [asked], fds)
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, os.fdopen(status, "rb"))
        return ForkedWorker(int(await reader.readline()), reader), ours, signs


def _serve(line: socket.socket) -> None:
    """Fork a worker for each request, below a process that reports its number and its exit status."""
    import openai

    for module in _IMPORTED:
        import_module(module)
    for client in (openai.OpenAI, openai.AsyncOpenAI):  # which import the rest of what they need
        assert client(api_key="none").chat.completions
    gc.collect()
    gc.freeze()  # a collection in a worker would copy the pages of all that is shared
    signal.signal(signal.SIGCHLD, _reap)
    while (request := socket.recv_fds(line, _LONGEST, 4))[0]:
        content, fds = request[:2]
        if os.fork() == 0:
            line.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _report(json.loads(content), *fds)
        for fd in fds:
            os.close(fd)


def _reap(*_: object) -> None:
    """Take leave of those that have reported, so that what they used is counted."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _report(asked: tuple[str, dict[str, str], list[str]], line: int, signs: int, output: int, status: int) -> None:
    worker = os.fork()
    if worker == 0:
        os.close(status)
        _work(asked, line, signs, output)
        _end()
    for fd in (line, signs, output):
        os.close(fd)
    os.write(status, b"%d\n" % worker)
    _, ended = os.waitpid(worker, 0)
    os.write(status, b"%d\n" % os.waitstatus_to_exitcode(ended))
    os._exit(0)


def _work(asked: tuple[str, dict[str, str], list[str]], line: int, signs: int, output: int) -> None:
    folder, environment, words = asked
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[0] = folder
    sys.path[1:1] = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.close(nothing)
    os.close(output)
    import_module("lightning_trainer.runner.worker.__main__").main(line, signs, words[0])


def _end() -> NoReturn:
    """End as Python does, but leave the memory to the system: to free each object takes 0.2 s of CPU."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
