"""A worker process: `python -m lightning_trainer.runner.worker FD PIPE HOW MARK`. It runs attempts on one loop.

The runner communicates with it through the socket FD, so that the agent's output goes to the log and never between the
messages, and PIPE carries its heartbeats. The process knows the contexts of its attempts and no other key.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import FrameType

from lightning_spans.errors import LightningError
from lightning_spans.record import stalls as watch
from lightning_spans.record.attach import attached_frameworks
from lightning_trainer.runner.protocol import encode, receive, receive_blocking
from lightning_trainer.runner.target import Job
from lightning_trainer.runner.undumpable import gain_nothing, in_fresh_memory, keep_to_ourselves
from lightning_trainer.runner.worker.execution import Agent, Score, in_loop_or_thread
from lightning_trainer.runner.worker.limits import WorkerLimits
from lightning_trainer.runner.worker.main_thread import MainThread
from lightning_trainer.runner.worker.program import Awaited, WorkerProgram, load_job
from lightning_trainer.runner.worker.watchdog import LoopWatch


async def _serve(sock: socket.socket, pipe: int, agent: Agent, score: Score | None, job: Job) -> bool:
    reader, writer = await asyncio.open_connection(sock=sock)
    writer.write(encode({"type": "ready", "attached": attached_frameworks()}))
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
        pipe: for heartbeats.
        how: ``shared`` by attempts, ``isolated`` from others of the same user, or run as a separate ``user``.
    """
    keep_to_ourselves()  # before the keys of attempts arrive
    # A service manager that stops a runner sends SIGTERM to its workers, too. The runner ends them, after its drain.
    signal.signal(signal.SIGTERM, _leave_to_runner)
    sock = socket.socket(fileno=fd)
    sock.set_inheritable(False)  # what the agent starts must not keep the runner's connection open
    os.set_inheritable(pipe, False)  # noqa: FBT003 - the system call's only form
    settings = receive_blocking(sock)
    job = Job(**settings["job"])
    try:
        if how == "isolated":
            in_fresh_memory()
        elif how == "user":
            gain_nothing()
        # What the agent forks ends with SIGTERM as usual. What it starts does so in any case, unlike with SIG_IGN.
        os.register_at_fork(before=_hold_sigterm, after_in_parent=_release_sigterm, after_in_child=_end_with_sigterm)
        watch.configure(os.environ.get("LIGHTNING_BOUNDS"))
        WorkerLimits(**settings["limits"]).apply(settings["n"])
        # Before there is an event loop, for modules that run their own while they are imported.
        main_thread = MainThread() if job.isolate else None
        agent, score = load_job(
            job, _in_threads(settings["concurrency"]) if main_thread is None else main_thread.awaitable
        )
    except LightningError as error:
        sock.sendall(encode({"type": "refused", "kind": type(error).__name__, "message": str(error)}))
        return
    worker = partial(_serve, sock, pipe, agent, score, job)
    if main_thread is not None:
        main_thread.serve(worker)
    elif asyncio.run(worker()):
        os._exit(1)  # a thread of the agent never ended, and Python would wait for it


def _leave_to_runner(_number: int, _frame: FrameType | None) -> None:
    """Handle SIGTERM in a worker: do nothing."""


def _is_left_to_runner() -> bool:
    return signal.getsignal(signal.SIGTERM) is _leave_to_runner  # unless the agent has set its own handler


def _hold_sigterm() -> None:
    if _is_left_to_runner():  # a child that gets it at once would lose it
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _release_sigterm() -> None:
    if _is_left_to_runner():
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _end_with_sigterm() -> None:
    if _is_left_to_runner():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _in_threads(concurrency: int) -> Awaited:
    threads = ThreadPoolExecutor(concurrency, thread_name_prefix="attempt")
    return partial(in_loop_or_thread, threads=threads)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
