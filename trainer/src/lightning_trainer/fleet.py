"""Worker processes and the attempts that run in them: placing, time limits, crashes."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from lightning_spans.context import Attempt
from lightning_spans.errors import LightningError
from lightning_spans.rewards import Reward
from lightning_spans.store import AttemptRecord, AttemptStatus
from lightning_trainer.messages import Message, attempt_to_json
from lightning_trainer.process import WorkerProcess
from lightning_trainer.target import Job

logger = logging.getLogger("lightning_trainer")

RESPAWN_S: Final = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


@dataclass(frozen=True, slots=True)
class Ended:
    """How an attempt ended, for the store."""

    status: AttemptStatus
    rewards: tuple[Reward, ...] = ()
    error: str | None = None


@dataclass(slots=True, eq=False)
class _Running:
    number: int
    record: AttemptRecord
    alone: bool
    forgotten: bool = False  # nobody waits for its result any more
    overdue: bool = False  # its time is up, and it was told so
    heard: bool = False  # the worker's event loop took that message, so it is not blocked
    timers: list[asyncio.TimerHandle] = field(default_factory=list)

    def stop_timers(self) -> None:
        for timer in self.timers:
            timer.cancel()


@dataclass(slots=True, eq=False)
class _Worker:
    process: WorkerProcess
    running: dict[int, _Running] = field(default_factory=dict)
    waiting: deque[AttemptRecord] = field(default_factory=deque)  # to run alone in this process
    draining: bool = False  # takes no more work: a thread in it hangs
    blocked: bool = False  # was killed because an attempt blocked its event loop

    @property
    def reserved(self) -> bool:
        return self.draining or bool(self.waiting) or any(running.alone for running in self.running.values())


class Fleet:
    """The worker processes of a runner. All methods belong to its event loop.

    An attempt that outlives its time limit is cancelled; when its thread hangs, its process takes no more work and is
    ended once its other attempts have ended; when it blocks the event loop, the process is ended at once. A process
    that dies takes all its attempts with it, and which of them killed it is not known: each is run again alone in a
    process, so that the next crash costs nobody else.

    Args:
        job: what is run.
        workers: number of processes; with 0, runners elsewhere do the work.
        concurrency: attempts at once in each.
        logs: folder for what the agents print.
        on_end: told once of each attempt placed, unless it was forgotten by `cancel`.
        grace_s: seconds that a cancelled attempt gets to end.
    """

    def __init__(
        self,
        job: Job,
        *,
        workers: int,
        concurrency: int,
        logs: Path,
        on_end: Callable[[AttemptRecord, Ended], None],
        grace_s: float = 5.0,
    ) -> None:
        self._job = job
        self._size = workers
        self._concurrency = concurrency
        self._logs = logs
        self._on_end = on_end
        self._grace_s = grace_s
        self._workers: list[_Worker] = []
        self._homeless: list[AttemptRecord] = []
        self._suspects: set[str] = set()  # rollouts that ran in a process when it died
        self._tasks: set[asyncio.Task[None]] = set()
        self._numbers = 0
        self._started = 0
        self._crashes = 0
        self._stopping = False
        self.attached: tuple[str, ...] = ()
        self.failure: LightningError | None = None

    async def start(self) -> None:
        """Start all processes; the first goes ahead, so that a wrong target is told once.

        Raises:
            LightningError: the agent can't be imported or called.
        """
        if self._size == 0:  # others run the rollouts
            return
        await self._spawn()
        await asyncio.gather(*(self._spawn() for _ in range(self._size - 1)))

    def free(self) -> int:
        """Attempts that could be placed now."""
        return sum(self._concurrency - len(w.running) for w in self._workers if not w.reserved)

    def held(self) -> list[AttemptRecord]:
        """Attempts placed and not ended."""
        placed = [record for w in self._workers for record in (*(r.record for r in w.running.values()), *w.waiting)]
        return [*placed, *self._homeless]

    def place(self, record: AttemptRecord) -> None:
        """Run an attempt in the process with the fewest; one under suspicion waits for a process to itself."""
        usable = [w for w in self._workers if not w.draining]
        if not usable:
            self._homeless.append(record)  # until the next process is there
            return
        worker = min(usable, key=lambda w: (w.reserved, len(w.running) + len(w.waiting)))
        if worker.reserved or record.rollout.rollout_id in self._suspects:
            worker.waiting.append(record)
            self._advance(worker)
        else:
            self._run(worker, record, alone=False)

    def cancel(self, attempt_id: str) -> None:
        """End an attempt whose result nobody wants any more: its lease is lost. `on_end` is not told."""
        self._homeless = [record for record in self._homeless if record.attempt_id != attempt_id]
        for worker in self._workers:
            for record in [r for r in worker.waiting if r.attempt_id == attempt_id]:
                worker.waiting.remove(record)
            for running in [r for r in worker.running.values() if r.record.attempt_id == attempt_id]:
                running.forgotten = True
                self._time_is_up(worker, running)

    async def stop(self) -> None:
        """End all processes. Attempts that still run are told as lost, so that another runner may take them."""
        self._stopping = True
        stopped = Ended("lost", error="the runner stopped")
        for record in self._homeless:
            self._on_end(record, stopped)
        for worker in self._workers:
            for record in worker.waiting:
                self._on_end(record, stopped)
            for running in list(worker.running.values()):
                self._end(worker, running, stopped)
        await asyncio.gather(*(worker.process.stop() for worker in self._workers))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def describe(self) -> str:
        """Say what each process does, for messages about what stalls."""
        lines = []
        for worker in self._workers:
            ids = [running.record.rollout.rollout_id for running in worker.running.values()]
            doing = f"runs {len(ids)}: {', '.join(ids[:4])}{', ...' if len(ids) > 4 else ''}" if ids else "is idle"
            lines.append(f"worker {worker.process.pid} {doing}; its log: {worker.process.log}")
        return "\n".join(lines) or "no worker process is alive"

    async def _spawn(self) -> None:
        number = self._started
        self._started += 1
        log = self._logs / f"worker-{number % self._size}.log"
        process = await WorkerProcess.start(self._job, self._concurrency, log)
        if self._stopping:
            await process.stop()
            return
        worker = _Worker(process)
        self.attached = worker.process.attached or self.attached
        self._workers.append(worker)
        self._begin(self._listen(worker))
        homeless, self._homeless = self._homeless, []
        for record in homeless:
            self.place(record)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _listen(self, worker: _Worker) -> None:
        while (message := await worker.process.receive()) is not None:
            self._take(worker, message)
        if not self._stopping:
            self._lost(worker, await worker.process.ended())

    def _take(self, worker: _Worker, message: Message) -> None:
        running = worker.running.get(message["id"])
        if running is None:
            return
        if message["type"] == "cancelling":
            running.heard = True
            return
        self.attached = tuple(message["attached"]) or self.attached
        if not message["flushed"]:
            logger.warning("spans of attempt %s were not delivered in time", running.record.attempt_id)
        if running.overdue:
            self._end(worker, running, _too_late(running.record))
        else:
            self._crashes = 0
            rewards = tuple(Reward(**reward) for reward in message["rewards"])
            self._end(worker, running, Ended(message["status"], rewards, message["error"]))

    def _run(self, worker: _Worker, record: AttemptRecord, *, alone: bool) -> None:
        # A store without a server gives no context: such an attempt is recorded, its calls go nowhere else.
        context = record.context or Attempt(record.rollout.rollout_id, record.attempt_id)
        self._numbers += 1
        running = _Running(self._numbers, record, alone)
        worker.running[running.number] = running
        worker.process.send(
            {
                "type": "run",
                "id": running.number,
                "task": record.rollout.task,
                "context": attempt_to_json(context),
            }
        )
        if (limit_s := record.rollout.timeout_s) is not None:
            loop = asyncio.get_running_loop()
            running.timers.append(loop.call_later(limit_s, self._time_is_up, worker, running))

    def _time_is_up(self, worker: _Worker, running: _Running) -> None:
        running.overdue = True
        worker.process.send({"type": "cancel", "id": running.number})
        loop = asyncio.get_running_loop()
        running.timers.append(loop.call_later(self._grace_s, self._does_not_end, worker, running))

    def _does_not_end(self, worker: _Worker, running: _Running) -> None:
        if running.number not in worker.running:
            return
        if running.heard:
            logger.warning("attempt %s does not end: its worker takes no more work", running.record.attempt_id)
            if not worker.draining:
                worker.draining = True
                self._begin(self._replace(0.0))
        else:
            logger.warning("attempt %s blocks its worker, which is ended", running.record.attempt_id)
            worker.blocked = True
            worker.process.kill()  # `_lost` then tells of all its attempts
            return
        self._end(worker, running, _too_late(running.record))

    def _end(self, worker: _Worker, running: _Running, ended: Ended) -> None:
        del worker.running[running.number]
        self._tell(running, ended)
        self._advance(worker)

    def _tell(self, running: _Running, ended: Ended) -> None:
        running.stop_timers()
        if ended.status == "succeeded":
            self._suspects.discard(running.record.rollout.rollout_id)
        if not running.forgotten:
            self._on_end(running.record, ended)

    def _advance(self, worker: _Worker) -> None:
        """Go on after a change: end a process that was drained, start the next attempt that runs alone."""
        if worker.running or self._stopping:
            return
        if worker.draining:
            worker.process.kill()
        elif worker.waiting:
            self._run(worker, worker.waiting.popleft(), alone=True)

    def _lost(self, worker: _Worker, how: str) -> None:
        """Tell of the attempts of a process that has ended, and start another one."""
        self._workers.remove(worker)
        for running in list(worker.running.values()):
            self._tell(running, self._victim(worker, running, how))
        for record in worker.waiting:
            self.place(record)
        if worker.draining:
            return  # its successor was started before
        logger.warning("worker %d ended with %s; see %s", worker.process.pid, how, worker.process.log)
        self._crashes += not worker.blocked
        self._begin(self._replace(RESPAWN_S[min(self._crashes, len(RESPAWN_S) - 1)]))

    def _victim(self, worker: _Worker, running: _Running, how: str) -> Ended:
        many = len(worker.running)
        if running.overdue:
            return _too_late(running.record)
        if worker.blocked:
            return Ended("lost", error="its worker process was ended, because another attempt blocked it")
        if many == 1:
            return Ended("failed", error=f"the agent ended its worker process with {how}")
        self._suspects.add(running.record.rollout.rollout_id)
        return Ended("lost", error=f"its worker process ended with {how} while {many} attempts ran in it")

    async def _replace(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        try:
            await self._spawn()
        except LightningError as error:
            self.failure = error  # the agent could be imported before and can't be now: the runner stops


def _too_late(record: AttemptRecord) -> Ended:
    return Ended("timeout", error=f"no result after {record.rollout.timeout_s:g} s, the time limit of an attempt")
