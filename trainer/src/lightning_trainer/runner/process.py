"""A worker process of this machine, seen from the runner: starting it, messages, ending it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, Final

from lightning_spans import errors
from lightning_spans.errors import ConfigError, LightningError
from lightning_spans.record.stalls import waiting
from lightning_trainer.runner.environment import without_keys
from lightning_trainer.runner.own_users import OwnUsers
from lightning_trainer.runner.protocol import Message, encode, receive
from lightning_trainer.runner.target import Job
from lightning_trainer.runner.worker.command import KILL_SIGNALS, status_text
from lightning_trainer.runner.worker.limits import NO_LIMITS, WorkerLimits
from lightning_trainer.runner.worker.subprocesses import WORKER, end_of_worker
from lightning_trainer.runner.worker.watchdog import LOOK_S
from lightning_trainer.runner.workers import Blocking, Death

IMPORT_LIMIT_S: Final = 300.0
STOP_S: Final = 8.0
SILENT_S: Final = 3.0  # a worker that is silent for longer is blocked as a whole
SILENT: Final = "a call that lets nothing else in its process run, such as one in C that keeps Python's lock"


class WorkerProcess:
    """One worker process. Created by `start`."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        log: Path,
        *,
        mark: str,
        undo: contextlib.AsyncExitStack,
    ) -> None:
        self._process = process
        self._undo = undo
        self._mark = mark
        self._reader = reader
        self._writer = writer
        self._log = log
        self._signs: asyncio.Task[None] | None = None
        self.attached: tuple[str, ...] = ()
        self.blocking: Blocking | None = None

    @classmethod
    async def start(
        cls,
        job: Job,
        concurrency: int,
        log: Path,
        *,
        number: int = 0,
        limits: WorkerLimits = NO_LIMITS,
        environment: Mapping[str, str] | None = None,
        users: OwnUsers | None = None,
    ) -> WorkerProcess:
        """Start a process and wait until it has imported the agent.

        Args:
            job: what it runs.
            concurrency: concurrent attempts.
            log: file to which the agent's output is appended.
            number: number of the worker, which determines its cores if they are limited.
            limits: what it may use.
            environment: the agent's environment; None: ours without our keys.
            users: assigns it a separate user; None: it runs as ours.

        Raises:
            LightningError: the agent cannot be imported or called, in the words of the process.
            ConfigError: the process ended, or said nothing for five minutes.
            OSError: the system has no room for a process.
        """
        mark = secrets.token_hex(8)
        kept = _environment(log, without_keys(os.environ) if environment is None else environment, mark)
        async with contextlib.AsyncExitStack() as undo:
            own: dict[str, Any] = {}
            how = "isolated" if job.isolate else "shared"
            if users is not None:
                user = await users.take()
                undo.push_async_callback(users.give_back, user)
                kept, how = user.environment(kept), "user"
                own = {"user": user.number, "group": user.number, "extra_groups": (), "umask": 0o077}
            process, line, signs = await _start_process(log, kept, (how, mark), own)
            reader, writer = await asyncio.open_connection(sock=line)
            worker = cls(process, reader, writer, log, mark=mark, undo=undo.pop_all())
        worker._signs = asyncio.create_task(worker._watch(signs))
        settings = {"job": asdict(job), "concurrency": concurrency, "limits": asdict(limits), "n": number}
        try:
            await worker._begin(settings)
        except BaseException:
            worker.kill()
            await process.wait()
            await worker._close()
            raise
        return worker

    async def _begin(self, settings: Message) -> None:
        self.send(settings)
        try:
            with waiting("worker start", f"worker {self.name} imports the agent; its log: {self.log}"):
                answer = await asyncio.wait_for(receive(self._reader), IMPORT_LIMIT_S)
        except TimeoutError:
            raise ConfigError(f"the agent was not imported within {IMPORT_LIMIT_S:.0f} s. See {self.log}.") from None
        if answer is None:
            status = status_text(await self._process.wait())
            raise ConfigError(f"a worker ended with {status} while it imported the agent. See {self.log}.")
        if answer["type"] == "refused":
            kind = getattr(errors, answer["kind"], ConfigError)
            raise kind(answer["message"]) if issubclass(kind, LightningError) else ConfigError(answer["message"])
        self.attached = tuple(answer["attached"])

    async def _watch(self, pipe: int) -> None:
        """Read what the worker reports about its event loop."""
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(pipe, "rb")
        )
        silent: int | None = None  # checks since its last message; None before its first
        try:
            while True:
                try:
                    async with asyncio.timeout(LOOK_S):
                        line = await reader.readline()
                except TimeoutError:
                    # Checks are counted, not seconds: a worker is not to blame if this process is blocked.
                    if silent is not None and (silent := silent + 1) * LOOK_S > SILENT_S:
                        self.blocking = Blocking(None, silent * LOOK_S, SILENT)
                    continue
                if not line:
                    return
                silent, told = 0, json.loads(line)
                self.blocking = None if told is None else Blocking(**told)
        finally:
            transport.close()

    @property
    def name(self) -> str:
        """The process id."""
        return str(self._process.pid)

    @property
    def log(self) -> str:
        """The file with the agent's output."""
        return str(self._log)

    def send(self, message: Message) -> None:
        """Send a message; a process that has ended does not get it, which `receive` reports."""
        with contextlib.suppress(ConnectionError):
            self._writer.write(encode(message))

    async def receive(self) -> Message | None:
        """Return the next message; None if the process has ended or hung up."""
        reading = asyncio.ensure_future(receive(self._reader))
        gone = asyncio.ensure_future(self._process.wait())
        try:
            await asyncio.wait({reading, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                # It has ended, but something it started may keep the connection open: read only what was already sent.
                await asyncio.wait({reading}, timeout=0.2)
            return reading.result() if reading.done() else None
        finally:
            reading.cancel()
            gone.cancel()

    async def ended(self) -> Death:
        """Wait for the end of a process that hung up, and return how it ended; one that keeps running is killed."""
        killed = False
        try:
            status = await asyncio.wait_for(self._process.wait(), STOP_S)
            killed = -status in KILL_SIGNALS
        except TimeoutError:
            self.kill()
            status = await self._process.wait()
        self.kill()  # what it started may still run
        await self._close()
        return Death(status_text(status), killed=killed)

    async def stop(self) -> None:
        """Let the process deliver its spans and end; kill it if it does not."""
        self.send({"type": "stop"})
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), STOP_S)
        self.kill()
        await self._process.wait()
        await self._close()

    async def _close(self) -> None:
        self._writer.close()
        if self._signs is not None:
            self._signs.cancel()
        await self._undo.aclose()

    def kill(self) -> None:
        """Kill the process and what it started, at once."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        end_of_worker(self._mark)


async def _start_process(
    log: Path, environment: Mapping[str, str], words: Sequence[str], own: Mapping[str, Any]
) -> tuple[asyncio.subprocess.Process, socket.socket, int]:
    """Start the process, and return it with our ends of its socket and of its heartbeat pipe.

    Raises:
        ConfigError: its log cannot be written.
        OSError: the system has no room for a process.
    """
    ours, theirs = socket.socketpair()
    signs, told = os.pipe()
    with theirs, _open_log(log) as output, os.fdopen(told, "wb"), contextlib.ExitStack() as undo:
        undo.callback(ours.close)
        undo.callback(os.close, signs)
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "lightning_trainer.runner.worker",
            str(theirs.fileno()),
            str(told),
            *words,
            pass_fds=(theirs.fileno(), told),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
            start_new_session=True,  # Ctrl-C at the terminal is for the runner, which then ends its workers
            **own,
        )
        undo.pop_all()
    return process, ours, signs


def _open_log(path: Path) -> IO[bytes]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Accessible to its owner only: agents print what they see.
        return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600), "ab")
    except OSError as error:
        raise ConfigError(f"the worker's log {path} can't be written: {error.strerror}.") from None


def _environment(log: Path, kept: Mapping[str, str], mark: str) -> dict[str, str]:
    # An agent whose calls all go to the policy does not need a key, but the openai client requires one.
    return {
        "OPENAI_API_KEY": "none",
        "LIGHTNING_SPOOL": str(log.parent.absolute() / "spool"),
        "PYTHONUNBUFFERED": "1",
        **kept,
        WORKER: mark,
    }
