"""A worker process: `python -m lightning_trainer.worker FD`. Runs the user's agent, many attempts at once on one loop.

The runner speaks to it through the socket FD, so that whatever the agent prints goes to the log and never between the
messages. The process knows the contexts of its attempts and no other key.
"""

from __future__ import annotations

import asyncio
import functools
import os
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

from lightning_spans.attach import attached, live_recorder
from lightning_spans.errors import LightningError
from lightning_trainer.command import run_command
from lightning_trainer.execution import Agent, Outcome, Score, execute, in_loop_or_thread
from lightning_trainer.messages import Message, attempt_from_json, encode, receive, receive_blocking
from lightning_trainer.target import Job, load_function, split_command

FLUSH_S = 30.0
STOP_S = 5.0


class Worker:
    """The worker's state: its agent, and the attempts that run."""

    def __init__(self, agent: Agent, score: Score | None, *, needs_reward: bool, writer: asyncio.StreamWriter) -> None:
        self._agent = agent
        self._score = score
        self._needs_reward = needs_reward
        self._writer = writer
        self._running: dict[int, asyncio.Task[None]] = {}

    async def serve(self, reader: asyncio.StreamReader) -> None:
        """Take messages until the runner says stop, or is gone."""
        while (message := await receive(reader)) is not None and message["type"] != "stop":
            if message["type"] == "run":
                self._start(message)
            elif message["type"] == "cancel" and (task := self._running.get(message["id"])):
                task.cancel()
                self._send({"type": "cancelling", "id": message["id"]})
        for task in self._running.values():
            task.cancel()
        if self._running:
            await asyncio.wait(self._running.values(), timeout=STOP_S)

    @property
    def busy(self) -> bool:
        """Whether an attempt still runs: a thread that did not end."""
        return bool(self._running)

    def _start(self, message: Message) -> None:
        number = message["id"]

        def done(task: asyncio.Task[None]) -> None:
            self._running.pop(number, None)
            if task.cancelled():  # before its first step, or while it delivered its spans
                self._send(_ended(number, Outcome("cancelled", error="cancelled"), flushed=False))

        self._running[number] = asyncio.create_task(self._run(message))
        self._running[number].add_done_callback(done)

    async def _run(self, message: Message) -> None:
        attempt = attempt_from_json(message["context"])
        outcome = await execute(self._agent, self._score, message["task"], attempt, needs_reward=self._needs_reward)
        self._send(_ended(message["id"], outcome, await _flush()))

    def _send(self, message: Message) -> None:
        self._writer.write(encode(message))


def _ended(number: int, outcome: Outcome, flushed: bool) -> Message:
    return {
        "type": "ended",
        "id": number,
        "status": outcome.status,
        "rewards": [asdict(reward) for reward in outcome.rewards],
        "error": outcome.error,
        "attached": attached(),
        "flushed": flushed,
    }


async def _flush() -> bool:
    """Deliver the spans so far, so that an attempt's spans are in the store when its end is reported."""
    recorder = live_recorder()
    return recorder is None or await asyncio.to_thread(recorder.tracer.flush, FLUSH_S)


def _load(job: Job, threads: ThreadPoolExecutor) -> tuple[Agent, Score | None]:
    score: Score | None = None
    if job.reward is not None:
        score = in_loop_or_thread(load_function(job.reward, option="reward", parameters=("task", "result")), threads)
    if job.command is not None:
        return functools.partial(run_command, split_command(job.command)), score
    run = in_loop_or_thread(load_function(job.target or "", option="target", parameters=("task",)), threads)

    async def agent(task: dict[str, Any], _: object) -> Any:
        return await run(task)

    return agent, score


async def _serve(sock: socket.socket, agent: Agent, score: Score | None, job: Job) -> bool:
    reader, writer = await asyncio.open_connection(sock=sock)
    writer.write(encode({"type": "ready", "attached": attached()}))
    worker = Worker(agent, score, needs_reward=job.needs_reward, writer=writer)
    await worker.serve(reader)
    await _flush()
    return worker.busy


def main(fd: int) -> None:
    """Serve the runner at the other end of this socket, then end the process."""
    sock = socket.socket(fileno=fd)
    sock.set_inheritable(False)  # what the agent starts must not hold the runner's line open
    settings = receive_blocking(sock)
    job = Job(**settings["job"])
    threads = ThreadPoolExecutor(settings["concurrency"], thread_name_prefix="attempt")
    try:
        # Before there is an event loop, for modules that run one of their own while they are imported.
        agent, score = _load(job, threads)
    except LightningError as error:
        sock.sendall(encode({"type": "refused", "kind": type(error).__name__, "message": str(error)}))
        return
    busy = asyncio.run(_serve(sock, agent, score, job))
    if busy:
        os._exit(1)  # a thread of the agent's never ended, and Python would wait for it


if __name__ == "__main__":
    main(int(sys.argv[1]))
