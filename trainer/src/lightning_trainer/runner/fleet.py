"""Workers and the attempts that run in them: placement, time limits, crashes."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import Any, Final

from lightning_spans.errors import LightningError
from lightning_spans.record import stalls
from lightning_spans.schema.attempts import Attempt, AttemptRecord
from lightning_spans.schema.rewards import Reward
from lightning_trainer.runner.crashes import AttemptEnd, Victim, blame_scorer, killed_attempt_end, too_late, verdict
from lightning_trainer.runner.places import RunningAttempt, WorkerPlace, watch_loop
from lightning_trainer.runner.protocol import FLUSH_S, Message, attempt_to_json
from lightning_trainer.runner.workers import Blocking, Start

logger = logging.getLogger("lightning_trainer")

RESPAWN_S: Final = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
SPAWN_TRIES: Final = 3  # in a row, with no worker left, before the runner gives up
SUSPECT_S: Final = 600.0  # for this long after a crash, attempts that ran in the process may be among the claimed ones
LEAKED_MOST: Final = 32  # threads that attempts may add to those of a process
GROWN_MOST: Final = 2  # times that they may add more, because pools of the program start their threads once
STALL_S: Final = 15.0  # an event loop that is blocked for this long is ended, if others wait for it
STALL_ALONE_S: Final = 5.0  # one that delays no other attempt is replaced after this long, and continues
APART_S: Final = 15.0  # an attempt that runs alone for this long gets its worker to itself: another one is started
APART_MOST: Final = 4  # such workers at once


class Fleet:
    """The workers of a runner. Call all methods on its event loop.

    An attempt that exceeds its time limit is cancelled; if its thread hangs, its process takes no more work and is
    ended once its other attempts have ended; if the event loop does not answer, the process is killed at once. It is
    also killed when its event loop is blocked while others wait for it. A process that dies takes all its attempts with
    it; `crashes` decides which of them uses up a try. Those that may have killed it are run again alone in a process,
    so that the next crash affects no others; if one of them takes long, another worker does what could run next to it.

    Args:
        start: starts a worker.
        workers: number of workers; with 0, runners elsewhere do the work.
        concurrency: concurrent attempts in each.
        on_end: called once for each placed attempt, unless it was forgotten by `cancel`.
        grace_s: seconds that a cancelled attempt gets to end.
        isolate: replace a worker after each attempt, so that nothing of one is left for the next. The next one is
            started while the attempt runs, so that no attempt waits for its imports.
        wait_for_all: whether `start` waits for all workers, or for the first: on a cluster, room may come later.
    """

    def __init__(
        self,
        start: Start,
        *,
        workers: int,
        concurrency: int,
        on_end: Callable[[AttemptRecord, AttemptEnd], None],
        grace_s: float = 5.0,
        isolate: bool = False,
        wait_for_all: bool = True,
    ) -> None:
        self._start = start
        self._size = workers
        self._concurrency = concurrency
        self._on_end = on_end
        self._grace_s = grace_s
        self._isolate = isolate
        self._wait_for_all = wait_for_all
        self._places: list[WorkerPlace] = []
        self._waiting: deque[AttemptRecord] = deque()  # for a worker with room, or for one to themselves
        self._suspects: dict[str, float] = {}  # rollouts that ran in a process when it died, and when
        self._tasks: set[asyncio.Task[None]] = set()
        self._numbers = 0
        self._started = 0
        self._crashes = 0
        self._stopping = False
        self.attached: tuple[str, ...] = ()
        self.unrecorded: Counter[str] = Counter()  # unrecorded calls that look like model calls, by host and path
        self.failure: LightningError | None = None

    async def start(self) -> None:
        """Start the workers; the first one alone, so that an invalid target is reported once.

        Raises:
            LightningError: the agent cannot be imported or called.
        """
        if self._size == 0:
            return
        await self._spawn()
        if self._wait_for_all:
            await asyncio.gather(*(self._spawn() for _ in range(self._size - 1)))
        else:
            for _ in range(self._size - 1):
                self._begin(self._replace(0.0))

    def free(self) -> int:
        """Return how many attempts fit now. After a crash, one per idle worker: it may have to run alone."""
        now = time.monotonic()
        self._suspects = {rollout: at for rollout, at in self._suspects.items() if now - at < SUSPECT_S}
        if self._waiting:
            return 0
        rooms = [(place.room(self._concurrency), place.running) for place in self._places]
        if self._suspects:
            return min(sum(room > 0 and not running for room, running in rooms), self._free_places())
        return min(sum(room for room, _ in rooms), self._free_places())

    def _free_places(self) -> int:
        """Return how many workers may begin work: with `isolate`, a spare worker does not add to those that work."""
        return self._size - sum(bool(place.running) for place in self._places) if self._isolate else sys.maxsize

    def held(self) -> list[AttemptRecord]:
        """Return the attempts that are placed and have not ended."""
        return [*(running.record for place in self._places for running in place.running.values()), *self._waiting]

    def place(self, record: AttemptRecord) -> None:
        """Run an attempt in the worker with the fewest; one that may kill processes waits for a worker to itself."""
        self._waiting.append(record)
        self._place_waiting()

    def _place_waiting(self) -> None:
        while self._waiting and not self._stopping:
            alone = self._waiting[0].disturbed > 0
            open_places = [place for place in self._places if place.room(self._concurrency)]
            place = min(open_places, key=lambda place: len(place.running), default=None)
            if place is None or (alone and place.running) or self._free_places() <= 0:
                return
            self._run(place, self._waiting.popleft(), alone=alone)

    def cancel(self, attempt_id: str) -> None:
        """End an attempt that has lost its lease: nobody wants its result any more. `on_end` is not called."""
        self._waiting = deque(record for record in self._waiting if record.attempt_id != attempt_id)
        for place in self._places:
            for running in [r for r in place.running.values() if r.record.attempt_id == attempt_id]:
                running.forgotten = True
                self._time_is_up(place, running)

    async def stop(self) -> None:
        """Stop all workers. Attempts that still run are released, so that another runner takes them."""
        self._stopping = True
        stopped = AttemptEnd("released", error="the runner stopped")
        for record in self._waiting:
            self._on_end(record, stopped)
        for place in self._places:
            for running in list(place.running.values()):
                self._end(place, running, stopped)
        with stalls.waiting("shutdown", lambda: f"the end of the workers: {self.describe()}"):
            await asyncio.gather(*(place.worker.stop() for place in self._places))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def describe(self) -> str:
        """Return what each worker does, as one line for messages about stalls."""
        return "; ".join(place.describe() for place in self._places) or "no worker is alive"

    async def _spawn(self) -> None:
        number = self._started
        self._started += 1
        worker = await self._start(number % self._size)
        if self._stopping:
            await worker.stop()
            return
        place = WorkerPlace(worker)
        self.attached = worker.attached or self.attached
        self._places.append(place)
        self._begin(self._listen(place))
        self._place_waiting()

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _listen(self, place: WorkerPlace) -> None:
        looking = asyncio.ensure_future(watch_loop(place.worker, partial(self._stands_still, place)))
        try:
            while (message := await place.worker.receive()) is not None:
                self._take(place, message)
        except Exception:
            logger.exception("worker %s sent an invalid message and is ended", place.worker.name)
            place.given_up = True
            place.worker.kill()
        finally:
            looking.cancel()
        if not self._stopping:
            await self._replace_worker(place)

    def _take(self, place: WorkerPlace, message: Message) -> None:
        running = place.running.get(message["id"])
        if running is None:
            return
        if message["type"] == "cancelling":
            running.heard = True
            return
        if message["type"] == "scoring":
            running.scoring = True
            running.wait.moved("reward function", f"the reward of attempt {running.record.attempt_id}")
            return
        if message["type"] == "flushing":
            running.wait.moved("sink flush", f"the spans of attempt {running.record.attempt_id} to be delivered")
            if not running.overdue:
                self._keep_result(place, running, message)
            return
        self.attached = tuple(message["attached"]) or self.attached
        self.unrecorded.update(message["unrecorded"])
        if not message["flushed"]:
            logger.warning("spans of attempt %s were not delivered in time", running.record.attempt_id)
        self._watch_threads(place, message["threads"])
        if running.overdue:
            self._end(place, running, _too_late(running))
        else:
            self._crashes = 0
            self._end(place, running, running.result or _end_of_message(running, message))

    def _keep_result(self, place: WorkerPlace, running: RunningAttempt, message: Message) -> None:
        running.result = ended = _end_of_message(running, message)
        running.stop_timers()
        bound_s, loop = FLUSH_S + 2 * self._grace_s + 1.0, asyncio.get_running_loop()
        running.timers.append(loop.call_later(bound_s, self._does_not_flush, place, running, ended))

    def _watch_threads(self, place: WorkerPlace, leaked: int) -> None:
        if leaked <= place.threads + LEAKED_MOST:
            return
        place.threads, place.grown = leaked, place.grown + 1
        if place.grown > GROWN_MOST and not place.draining:
            logger.warning(
                "attempts left %d threads running in worker %s: it gets no more work", leaked, place.worker.name
            )
            self._drain(place)

    def _drain(self, place: WorkerPlace) -> None:
        if not place.draining:
            place.draining = True
            self._begin(self._replace(0.0))

    def _run(self, place: WorkerPlace, record: AttemptRecord, *, alone: bool) -> None:
        # A store without a server gives no context: the attempt is recorded, but its calls are not redirected.
        context = record.context or Attempt(record.rollout.rollout_id, record.attempt_id)
        self._numbers += 1
        limit_s = record.rollout.timeout_s
        bound_s = None if limit_s is None else limit_s + 2 * self._grace_s + 1.0
        what = f"attempt {record.attempt_id} in worker {place.worker.name}"
        running = RunningAttempt(self._numbers, record, alone, stalls.begin("agent", what, bound_s))
        place.running[running.number] = running
        place.worker.send(
            {
                "type": "run",
                "id": running.number,
                "task": record.rollout.task,
                "context": attempt_to_json(context),
            }
        )
        if self._isolate:
            self._drain(place)
        loop = asyncio.get_running_loop()
        if limit_s is not None:
            running.timers.append(loop.call_later(limit_s, self._time_is_up, place, running))
        if alone:
            running.timers.append(loop.call_later(APART_S, self._set_apart, place))

    def _stands_still(self, place: WorkerPlace, held: Blocking) -> None:
        """End a worker whose event loop blocks others; one that blocks no others may continue."""
        if len(place.running) == 1 and held.seconds > STALL_ALONE_S:
            self._set_apart(place)
        elif len(place.running) > 1 and held.seconds > STALL_S and not place.stood_still:
            self._end_standing(place, held)

    def _end_standing(self, place: WorkerPlace, held: Blocking | None) -> None:
        place.stood_still, place.held_by = True, held
        logger.warning(
            "the event loop of worker %s has been blocked%s, so other rollouts wait: the worker is ended, and they run"
            " again. Await the call that blocks, or make the function synchronous: it then runs in a thread",
            place.worker.name,
            "" if held is None else f" for {held.seconds:.0f} s at {held.where}",
        )
        place.worker.kill()  # `_replace_worker` then reports all its attempts

    def _set_apart(self, place: WorkerPlace) -> None:
        """Let the attempt there continue by itself, and start another worker for what could run next to it."""
        if self._concurrency > 1 and not place.draining and sum(one.apart for one in self._places) < APART_MOST:
            place.apart = True
            self._drain(place)

    def _time_is_up(self, place: WorkerPlace, running: RunningAttempt) -> None:
        running.overdue = True
        place.worker.send({"type": "cancel", "id": running.number})
        loop = asyncio.get_running_loop()
        running.timers.append(loop.call_later(self._grace_s, self._does_not_end, place, running))

    def _does_not_end(self, place: WorkerPlace, running: RunningAttempt) -> None:
        if running.number not in place.running or place.stood_still:
            return
        if running.heard:
            logger.warning("attempt %s does not end: its worker gets no more work", running.record.attempt_id)
            self._drain(place)
            self._end(place, running, _too_late(running))
        else:
            self._end_standing(place, place.worker.blocking)

    def _does_not_flush(self, place: WorkerPlace, running: RunningAttempt, ended: AttemptEnd) -> None:
        logger.warning(
            "the spans of attempt %s are not delivered: its worker gets no more work", running.record.attempt_id
        )
        self._drain(place)
        self._end(place, running, ended)

    def _end(self, place: WorkerPlace, running: RunningAttempt, ended: AttemptEnd) -> None:
        del place.running[running.number]
        self._tell(running, ended)
        self._advance(place)

    def _tell(self, running: RunningAttempt, ended: AttemptEnd) -> None:
        running.stop_timers()
        running.wait.end()
        rollout_id = running.record.rollout.rollout_id
        if ended.status == "disturbed":
            self._suspects[rollout_id] = time.monotonic()
        else:
            self._suspects.pop(rollout_id, None)
        if not running.forgotten:
            self._on_end(running.record, ended)

    def _advance(self, place: WorkerPlace) -> None:
        """Continue after a change: end a drained process, start waiting attempts."""
        if self._stopping:
            return
        if place.draining and not place.running:
            place.worker.kill()
        self._place_waiting()

    async def _replace_worker(self, place: WorkerPlace) -> None:
        """Report the attempts of a worker that has ended, and start another one."""
        place.draining, drained = True, place.draining  # nothing more is placed there
        death = await place.worker.ended()
        if place.given_up:
            death = replace(death, outside=True)
        self._places.remove(place)
        company = len(place.running)
        for running in list(place.running.values()):
            victim = Victim(
                number=running.number,
                record=running.record,
                company=company,
                told=running.overdue and running.heard,
                overdue=running.overdue,
                scoring=running.scoring,
            )
            self._tell(running, verdict(victim, death, stood_still=place.stood_still, blocking=place.held_by))
        if drained:
            return  # its successor was started before
        logger.warning("worker %s ended with %s; see %s", place.worker.name, death.how, place.worker.log)
        self._crashes += not (company or place.stood_still or death.outside)  # an attempt that dies uses up a try
        self._begin(self._replace(RESPAWN_S[min(self._crashes, len(RESPAWN_S) - 1)]))

    async def _replace(self, delay_s: float) -> None:
        """Start another worker; keep trying while others work, and give up after some tries when none is left."""
        tries = 0
        while not self._stopping:
            await asyncio.sleep(delay_s)
            try:
                await self._spawn()
            except (LightningError, OSError) as error:
                tries += 1
                logger.warning("a worker can't be started: %s", error)
                if tries >= SPAWN_TRIES and not self._places:
                    self.failure = error if isinstance(error, LightningError) else LightningError(str(error))
                    return
                delay_s = RESPAWN_S[min(tries, len(RESPAWN_S) - 1)]
            else:
                return


def _end_of_message(running: RunningAttempt, message: Message) -> AttemptEnd:
    if message["status"] == "killed":
        return killed_attempt_end(running.record, "the command", message["error"])
    return AttemptEnd(message["status"], tuple(Reward(**reward) for reward in message["rewards"]), message["error"])


def _too_late(running: RunningAttempt) -> AttemptEnd:
    return blame_scorer(too_late(running.record)) if running.scoring else too_late(running.record)
