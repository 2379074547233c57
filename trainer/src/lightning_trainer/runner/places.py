"""The fleet's view of a worker: what runs in it, and whether it accepts more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from lightning_spans.record import stalls
from lightning_spans.schema.attempts import AttemptRecord
from lightning_trainer.runner.crashes import AttemptEnd
from lightning_trainer.runner.workers import Blocking, Worker

_LOOK_S: Final = 0.25  # between checks of what a worker reports about its event loop


@dataclass(slots=True, eq=False)
class RunningAttempt:
    """An attempt in a worker.

    Attributes:
        number: number of the message that started it.
        record: the attempt.
        alone: nothing else may run in its worker.
        wait: names what it waits for, in messages about stalls.
        forgotten: nobody waits for its result any more.
        overdue: its time is up, and a cancellation was sent.
        scoring: the agent has answered, and its reward is being computed.
        heard: the worker's event loop received the cancellation, so it is not blocked.
        result: its end, once its program has ended in time; only its spans are still to be delivered.
        timers: timers of its time limits.
    """

    number: int
    record: AttemptRecord
    alone: bool
    wait: stalls.Wait
    forgotten: bool = False
    overdue: bool = False
    scoring: bool = False
    heard: bool = False
    result: AttemptEnd | None = None
    timers: list[asyncio.TimerHandle] = field(default_factory=list)

    def stop_timers(self) -> None:
        """Cancel its time limits: its program has ended."""
        for timer in self.timers:
            timer.cancel()


@dataclass(slots=True, eq=False)
class WorkerPlace:
    """A worker, and what runs in it.

    Attributes:
        worker: the process or actor.
        running: its attempts, by number.
        draining: it gets no more work: a thread in it hangs, too many were left behind, or another worker replaced it.
        apart: it has been replaced, because its only attempt takes long and others waited.
        stood_still: it was killed because its event loop did not answer.
        held_by: what blocked it then.
        given_up: it was killed because its message could not be processed.
        threads: how many threads of the program it had when their number last grew much.
        grown: how often that number grew much.
    """

    worker: Worker
    running: dict[int, RunningAttempt] = field(default_factory=dict)
    draining: bool = False
    apart: bool = False
    stood_still: bool = False
    held_by: Blocking | None = None
    given_up: bool = False
    threads: int = 0
    grown: int = 0

    def room(self, concurrency: int) -> int:
        """Return how many attempts it takes now. Zero while its event loop is blocked: they would be stuck too."""
        if self.draining or self.worker.blocking is not None or any(one.alone for one in self.running.values()):
            return 0
        return max(0, concurrency - len(self.running))

    def describe(self) -> str:
        """Return what the worker does, as part of a line."""
        ids = [running.record.rollout.rollout_id for running in self.running.values()]
        doing = f"runs {len(ids)}: {', '.join(ids[:4])}{', ...' if len(ids) > 4 else ''}" if ids else "is idle"
        held = self.worker.blocking
        still = f"; its event loop has stood still for {held.seconds:.0f} s at {held.where}" if held else ""
        return f"worker {self.worker.name} {doing}{still}; its log: {self.worker.log}"


async def watch_loop(worker: Worker, on_block: Callable[[Blocking], None]) -> None:
    """Report a worker as stalled while its event loop is blocked, and call back at each check that finds it so."""
    wait: stalls.Wait | None = None
    try:
        while True:
            await asyncio.sleep(_LOOK_S)
            held = worker.blocking
            if held is None and wait is not None:
                wait.end()
                wait = None
            elif held is not None and wait is None:
                wait = stalls.begin("worker", lambda: _describe_block(worker))
                wait.since -= held.seconds
            if held is not None:
                on_block(held)
    finally:
        if wait is not None:
            wait.end()


def _describe_block(worker: Worker) -> str:
    held = worker.blocking
    return f"the event loop of worker {worker.name}, at {held.where if held else 'a place it has left'}"
