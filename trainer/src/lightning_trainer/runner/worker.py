"""A worker: `python -m lightning_trainer.runner.worker FD PIPE HOW MARK`. Runs the agent, many attempts on one loop.

The runner speaks to it through the socket FD, so that whatever the agent prints goes to the log and never between the
messages, and PIPE carries its signs of life. The process knows the contexts of its attempts and no other key.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import asdict
from typing import Any

from lightning_spans.errors import LightningError
from lightning_spans.record import stalls as watch
from lightning_spans.record import unrecorded
from lightning_spans.record.attach import attached
from lightning_spans.record.pipeline import live_recorder
from lightning_trainer.runner.command_agent import command_agent
from lightning_trainer.runner.execution import (
    LATER,
    Agent,
    AttemptResult,
    Score,
    describe,
    execute,
    in_loop_or_thread,
    plain,
)
from lightning_trainer.runner.limits import WorkerLimits
from lightning_trainer.runner.protocol import Message, attempt_from_json, encode, receive, receive_blocking
from lightning_trainer.runner.subprocesses import Subprocesses
from lightning_trainer.runner.target import Job, load_function
from lightning_trainer.runner.undumpable import gain_nothing, in_fresh_memory, keep_to_ourselves
from lightning_trainer.runner.watchdog import LoopWatch, leaked_threads

FLUSH_S = 30.0
STOP_S = 5.0

_NUMBER: ContextVar[int | None] = ContextVar("lightning-attempt-number", default=None)


class WorkerProgram:
    """The worker's state: its agent, and the attempts that run.

    Args:
        agent: what it runs.
        score: gives the reward of a task and its result; None: the result is the reward.
        needs_reward: whether an attempt that gave no reward has failed.
        send: takes messages for the runner.
    """

    def __init__(
        self, agent: Agent, score: Score | None, *, needs_reward: bool, send: Callable[[Message], None]
    ) -> None:
        self._agent = agent
        self._score = score
        self._needs_reward = needs_reward
        self._send = send
        self._running: dict[int, asyncio.Task[None]] = {}
        self._subprocesses = Subprocesses(_NUMBER.get)
        self._subprocesses.watch()

    def take(self, message: Message) -> None:
        """Take a message of the runner's: begin an attempt, or cancel one."""
        if message["type"] == "run":
            self._start(message)
        elif message["type"] == "cancel" and (task := self._running.get(message["id"])):
            task.cancel()
            self._send({"type": "cancelling", "id": message["id"]})

    async def stop(self) -> None:
        """Cancel what runs, and deliver the spans so far."""
        for task in self._running.values():
            task.cancel()
        if self._running:
            await asyncio.wait(self._running.values(), timeout=STOP_S)
        await _flush()

    def number_of(self, task: asyncio.Task[object]) -> int | None:
        """Return the attempt that a task runs, or was started by where Python can tell."""
        own = next((number for number, running in list(self._running.items()) if running is task), None)
        if own is None and hasattr(task, "get_context"):  # from Python 3.12 on
            own = task.get_context().get(_NUMBER)
        return own

    @property
    def busy(self) -> bool:
        """Whether an attempt still runs: a thread that did not end."""
        return bool(self._running)

    def _start(self, message: Message) -> None:
        number = message["id"]

        def done(task: asyncio.Task[None]) -> None:
            self._running.pop(number, None)
            if task.cancelled():  # before its first step, or while it delivered its spans
                self._send(_ended(number, AttemptResult("cancelled", error="cancelled"), flushed=False))
            elif (error := task.exception()) is not None:  # ours: the attempt must not wait for its time limit
                self._send(_ended(number, AttemptResult("failed", error=describe(error)), flushed=False))

        self._running[number] = asyncio.create_task(self._run(message))
        self._running[number].add_done_callback(done)

    async def _run(self, message: Message) -> None:
        _NUMBER.set(message["id"])
        attempt = attempt_from_json(message["context"])
        outcome = await execute(
            self._agent,
            self._score,
            message["task"],
            attempt,
            needs_reward=self._needs_reward,
            on_score=lambda: self._send({"type": "scoring", "id": message["id"]}),
        )
        left = await asyncio.to_thread(self._subprocesses.end, message["id"])
        if left:
            names = ", ".join(left)
            sys.stderr.write(f"attempt {attempt.attempt_id} left processes running, ended with it: {names}\n")
        self._send({"type": "flushing", "id": message["id"]})
        self._send(_ended(message["id"], outcome, await _flush()))


def _ended(number: int, outcome: AttemptResult, flushed: bool) -> Message:
    return {
        "type": "ended",
        "id": number,
        "status": outcome.status,
        "rewards": [asdict(reward) for reward in outcome.rewards],
        "error": None if outcome.error is None else plain(outcome.error),
        "attached": attached(),
        "unrecorded": unrecorded.take(),
        "flushed": flushed,
        "threads": leaked_threads(),
    }


async def _flush() -> bool:
    """Deliver the spans so far, so that an attempt's spans are in the store when its end is reported."""
    recorder = live_recorder()
    return recorder is None or await asyncio.to_thread(recorder.tracer.flush, FLUSH_S)


def load_job(job: Job, threads: ThreadPoolExecutor) -> tuple[Agent, Score | None]:
    """Import the agent and its reward function.

    Raises:
        LightningError: one of them can't be imported or called.
    """
    score: Score | None = None
    if job.judged:
        score = _left_to_the_judge
    elif job.reward is not None:
        score = in_loop_or_thread(load_function(job.reward, option="reward", parameters=("task", "result")), threads)
    if job.command is not None:
        return command_agent(job), score
    run = in_loop_or_thread(load_function(job.target or "", option="target", parameters=("task",)), threads)

    async def agent(task: dict[str, Any], _: object) -> Any:
        return await run(task)

    return agent, score


async def _left_to_the_judge(_task: dict[str, Any], _result: object) -> object:
    """Give no reward now."""
    return LATER


async def _serve(sock: socket.socket, pipe: int, agent: Agent, score: Score | None, job: Job) -> bool:
    reader, writer = await asyncio.open_connection(sock=sock)
    writer.write(encode({"type": "ready", "attached": attached(), "threads": leaked_threads()}))
    worker = WorkerProgram(
        agent,
        score,
        needs_reward=job.needs_reward and not job.judged,
        send=lambda message: writer.write(encode(message)),
    )
    watch = LoopWatch(pipe, worker.number_of)
    while (message := await receive(reader)) is not None and message["type"] != "stop":
        worker.take(message)
    await worker.stop()
    watch.close()
    return worker.busy


def main(fd: int, pipe: int, how: str) -> None:
    """Serve the runner at the other end of this socket, then end the process.

    Args:
        fd: the socket.
        pipe: for signs of life.
        how: ``shared`` by attempts, ``isolated`` from others of the same user, or as a ``user`` of its own.
    """
    keep_to_ourselves()  # before the keys of attempts come
    sock = socket.socket(fileno=fd)
    sock.set_inheritable(False)  # what the agent starts must not hold the runner's line open
    os.set_inheritable(pipe, False)  # noqa: FBT003 - the system call's only form
    settings = receive_blocking(sock)
    job = Job(**settings["job"])
    threads = ThreadPoolExecutor(settings["concurrency"], thread_name_prefix="attempt")
    try:
        if how == "isolated":
            in_fresh_memory()
        elif how == "user":
            gain_nothing()
        watch.configure(os.environ.get("LIGHTNING_BOUNDS"))
        WorkerLimits(**settings["limits"]).apply(settings["n"])
        # Before there is an event loop, for modules that run one of their own while they are imported.
        agent, score = load_job(job, threads)
    except LightningError as error:
        sock.sendall(encode({"type": "refused", "kind": type(error).__name__, "message": str(error)}))
        return
    busy = asyncio.run(_serve(sock, pipe, agent, score, job))
    if busy:
        os._exit(1)  # a thread of the agent's never ended, and Python would wait for it


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
