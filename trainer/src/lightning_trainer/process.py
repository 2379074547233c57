"""A worker process as the runner sees it: started, spoken to, ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from dataclasses import asdict
from pathlib import Path
from typing import IO, Final

from lightning_spans import errors
from lightning_spans.errors import ConfigError, LightningError
from lightning_trainer.command import status_text
from lightning_trainer.messages import Message, encode, receive
from lightning_trainer.target import Job

IMPORT_LIMIT_S: Final = 300.0
STOP_S: Final = 8.0
SECRETS: Final = ("LIGHTNING_KEY", "LIGHTNING_KEY_FILE")  # an agent gets the key of its attempt and no other


class WorkerProcess:
    """One worker process. Made by `start`."""

    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, log: Path
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self.log = log
        self.attached: tuple[str, ...] = ()

    @classmethod
    async def start(cls, job: Job, concurrency: int, log: Path) -> WorkerProcess:
        """Start a process and wait until it has imported the agent.

        Args:
            job: what it runs.
            concurrency: attempts at once.
            log: file that what the agent prints is added to.

        Raises:
            LightningError: the agent can't be imported or called, in the words of the process.
            ConfigError: the process ended, or said nothing for five minutes.
        """
        ours, theirs = socket.socketpair()
        with theirs, _open_log(log) as output:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "lightning_trainer.worker",
                str(theirs.fileno()),
                pass_fds=(theirs.fileno(),),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=_environment(log),
                start_new_session=True,  # Ctrl-C at the terminal is for the runner, which then ends its workers
            )
        reader, writer = await asyncio.open_connection(sock=ours)
        worker = cls(process, reader, writer, log)
        try:
            await worker._begin(job, concurrency)
        except BaseException:
            worker.kill()
            await process.wait()
            raise
        return worker

    async def _begin(self, job: Job, concurrency: int) -> None:
        self.send({"job": asdict(job), "concurrency": concurrency})
        try:
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

    @property
    def pid(self) -> int:
        """The process's number."""
        return self._process.pid

    def send(self, message: Message) -> None:
        """Send a message; a process that has gone does not get it, and `receive` tells."""
        with contextlib.suppress(ConnectionError):
            self._writer.write(encode(message))

    async def receive(self) -> Message | None:
        """Give the next message; None when the process has gone or hung up."""
        reading = asyncio.ensure_future(receive(self._reader))
        gone = asyncio.ensure_future(self._process.wait())
        try:
            await asyncio.wait({reading, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                # It has gone, but something it started may hold the line open: take what it said before, no more.
                await asyncio.wait({reading}, timeout=0.2)
            return reading.result() if reading.done() else None
        finally:
            reading.cancel()
            gone.cancel()

    async def ended(self) -> str:
        """Wait for the end of a process that hung up, and say how it ended; one that lives on is killed."""
        try:
            status = await asyncio.wait_for(self._process.wait(), STOP_S)
        except TimeoutError:
            self.kill()
            status = await self._process.wait()
        self._writer.close()
        return status_text(status)

    async def stop(self) -> None:
        """Let the process deliver its spans and end; kill it when it does not."""
        self.send({"type": "stop"})
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), STOP_S)
        self.kill()
        await self._process.wait()
        self._writer.close()

    def kill(self) -> None:
        """End the process and what it started, at once."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)


def _open_log(path: Path) -> IO[bytes]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("ab")
    except OSError as error:
        raise ConfigError(f"the worker's log {path} can't be written: {error.strerror}.") from None


def _environment(log: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in SECRETS}
    # An agent whose calls all go to the policy needs no key of its own, but the openai client refuses to be without.
    return {
        "OPENAI_API_KEY": "none",
        "LIGHTNING_SPOOL": str(log.parent.absolute() / "spool"),
        "PYTHONUNBUFFERED": "1",
        **kept,
    }
