"""The work of any worker: imports the agent, runs many attempts on one loop, and reports how they ended."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar, copy_context
from dataclasses import asdict
from typing import Any, Final, TypeVar

from lightning_spans.record import unrecorded
from lightning_spans.record.attach import attached_frameworks
from lightning_spans.record.delivery.leftover import deliver_left
from lightning_spans.record.instrument.processes import carry_attempts
from lightning_spans.record.pipeline import live_recorder
from lightning_trainer.runner.protocol import FLUSH_S, Message, attempt_from_json
from lightning_trainer.runner.target import Job, load_function
from lightning_trainer.runner.worker.command_agent import command_agent, wait_for_spans
from lightning_trainer.runner.worker.execution import (
    LATER,
    Agent,
    AttemptResult,
    Score,
    describe,
    execute,
    plain,
)
from lightning_trainer.runner.worker.forks import keep_imports_whole
from lightning_trainer.runner.worker.subprocesses import Subprocesses
from lightning_trainer.runner.worker.watchdog import leaked_threads

STOP_S = 5.0

_Given = TypeVar("_Given")
_Result = TypeVar("_Result")
Awaited = Callable[[Callable[..., Any]], Callable[..., Awaitable[Any]]]
# For the ends of attempts. Agents may fill the loop's own executor for as long as they like, with `asyncio.to_thread`.
_threads: Final = ThreadPoolExecutor(thread_name_prefix="lightning-end")
_NUMBER: ContextVar[int | None] = ContextVar("lightning-attempt-number", default=None)


class WorkerProgram:
    """The worker's state: its agent, and the attempts that run.

    Args:
        agent: what it runs.
        score: returns the reward of a task and its result; None: the result is the reward.
        needs_reward: whether an attempt without a reward has failed.
        send: sends messages to the runner.
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
        carry_attempts()
        keep_imports_whole()

    def take(self, message: Message) -> None:
        """Handle a message from the runner: begin an attempt, or cancel one."""
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
        """Return the number of the attempt that a task runs, or of the one that started it, if Python can tell."""
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
                self._send(_ended_message(number, AttemptResult("cancelled", error="cancelled"), flushed=False))
            elif (error := task.exception()) is not None:  # our own error: the attempt must not wait for its time limit
                self._send(_ended_message(number, AttemptResult("failed", error=describe(error)), flushed=False))

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
        # The rest does not count towards the time limit.
        self._send({"type": "flushing", "id": message["id"], **_result_to_json(outcome)})
        left = await _in_own_thread(self._subprocesses.end, message["id"])
        if left:
            names = ", ".join(left)
            sys.stderr.write(f"attempt {attempt.attempt_id} left processes running, ended with it: {names}\n")
        self._send(_ended_message(message["id"], outcome, await _flush()))


def _ended_message(number: int, outcome: AttemptResult, flushed: bool) -> Message:
    return {
        "type": "ended",
        "id": number,
        **_result_to_json(outcome),
        "attached": attached_frameworks(),
        "unrecorded": unrecorded.take(),
        "flushed": flushed,
        "threads": leaked_threads(),
    }


def _result_to_json(outcome: AttemptResult) -> Message:
    return {
        "status": outcome.status,
        "rewards": [asdict(reward) for reward in outcome.rewards],
        "error": None if outcome.error is None else plain(outcome.error),
    }


async def _flush() -> bool:
    """Deliver the spans so far, so that an attempt's spans are in the store when its end is reported.

    This includes those of processes that the attempt started and that ended before they could deliver them.
    """
    recorder = live_recorder()
    flush = deliver_left if recorder is None else recorder.tracer.flush
    return all(await asyncio.gather(_in_own_thread(flush, FLUSH_S), wait_for_spans(FLUSH_S)))


async def _in_own_thread(function: Callable[[_Given], _Result], given: _Given) -> _Result:
    context = copy_context()
    return await asyncio.get_running_loop().run_in_executor(_threads, lambda: context.run(function, given))


def load_job(job: Job, awaitable: Awaited) -> tuple[Agent, Score | None]:
    """Import the agent and its reward function.

    Args:
        job: the agent.
        awaitable: makes the user's functions awaitable on the worker's loop.

    Raises:
        LightningError: one of them cannot be imported or called.
    """
    score: Score | None = None
    if job.judged:
        score = _left_to_the_judge
    elif job.reward is not None:
        score = awaitable(load_function(job.reward, option="reward", parameters=("task", "result")))
    if job.command is not None:
        return command_agent(job), score
    run = awaitable(load_function(job.target or "", option="target", parameters=("task",)))

    async def agent(task: dict[str, Any], _: object) -> Any:
        return await run(task)

    return agent, score


async def _left_to_the_judge(_task: dict[str, Any], _result: object) -> object:
    """Give no reward now."""
    return LATER
