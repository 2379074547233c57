"""The runner: claims rollouts from a store, runs the agent on them in worker processes, and reports how they ended.

It needs only a `Store`: the server's own, or one reached over HTTP, on any number of machines. It runs in its own
thread, with its own event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Final, TypeVar

from lightning_spans.errors import ConfigError, LeaseLostError, LightningError, RefusedError, UnauthorizedError
from lightning_spans.record import stalls
from lightning_spans.schema.attempts import AttemptRecord
from lightning_spans.store import Store
from lightning_trainer.runner.crashes import AttemptEnd
from lightning_trainer.runner.environment import explain_missing_variables
from lightning_trainer.runner.fleet import Fleet
from lightning_trainer.runner.own_users import OwnUsers
from lightning_trainer.runner.process import WorkerProcess
from lightning_trainer.runner.target import Job
from lightning_trainer.runner.undumpable import keep_to_ourselves
from lightning_trainer.runner.worker.limits import NO_LIMITS, WorkerLimits
from lightning_trainer.runner.workers import Start

logger = logging.getLogger("lightning_trainer")
T = TypeVar("T")

IDLE_S: Final = (0.02, 0.05, 0.1, 0.25)  # pauses between claims while there is nothing to do
RETRY_S: Final = (0.5, 1.0, 2.0, 5.0, 10.0)  # pauses while the store cannot be reached
STORE_THREADS: Final = 8


class Runner:
    """A thread that runs rollouts until it is stopped.

    Args:
        job: the agent.
        workers: number of worker processes.
        concurrency: concurrent attempts in each.
        logs: folder for the agents' output.
        lease_s: time after which a dead runner is noticed; renewed three times in that time.
        grace_s: seconds that an attempt gets to end once its time is up.
        limits: what each worker process may use.
        environment: the agents' environment; None: ours without our keys.
        users: user ids, of which each attempt's process gets a separate one; None: all run as ours. The job is then
            isolated.
        start: starts a worker elsewhere than in a process of this machine.

    Attributes:
        ended: number of attempts that ended in its workers.

    Raises:
        ConfigError: this system cannot enforce the limits, or cannot provide separate users.
    """

    def __init__(
        self,
        job: Job,
        *,
        workers: int,
        concurrency: int,
        logs: Path,
        lease_s: float = 60.0,
        grace_s: float = 5.0,
        limits: WorkerLimits = NO_LIMITS,
        environment: Mapping[str, str] | None = None,
        users: range | None = None,
        start: Start | None = None,
    ) -> None:
        limits.check()
        self.job = job
        self.ended = 0
        self._passed = environment
        self.name = f"{socket.gethostname()}-{uuid.uuid4().hex[:6]}"
        self._lease_s = lease_s
        self._users = own = None if users is None else OwnUsers(users, workers)

        async def process(number: int) -> WorkerProcess:
            log = logs / f"worker-{number}.log"
            return await WorkerProcess.start(
                job,
                concurrency,
                log,
                number=number,
                limits=limits,
                environment=environment,
                users=own,
            )

        self._fleet = Fleet(
            start or process,
            workers=workers,
            concurrency=1 if job.isolate else concurrency,
            on_end=self._finish_attempt,
            isolate=job.isolate,
            grace_s=grace_s,
            wait_for_all=start is None,
        )
        self._beats = ThreadPoolExecutor(1, thread_name_prefix="runner-beat")  # not delayed by results that wait
        self._finishing: dict[str, AttemptRecord] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._drain_s = 0.0
        self._heard_since: float | None = time.monotonic()  # time since which heartbeats succeed; None: they fail
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="lightning-runner", daemon=True)
        self._ready = threading.Event()
        self._failure: LightningError | None = None

    def start(self) -> None:
        """Start the worker processes. Nothing is claimed before `serve`.

        Raises:
            LightningError: the agent cannot be imported or called.
        """
        keep_to_ourselves()  # the process that starts a runner has keys that its agents must not see
        self._thread.start()
        self._ready.wait()
        if self._failure is not None:
            self._thread.join()
            raise self._failure

    def serve(self, store: Store) -> None:
        """Begin to claim rollouts from this store, and report to it how they end."""
        self._store = store
        self._call(self._begin)

    def drain(self, drain_s: float) -> None:
        """Stop claiming, let attempts continue for `drain_s` seconds, stop the workers, and release remaining attempts.

        Does not wait. Another call, or `stop`, changes the time.
        """
        self._drain_s = drain_s
        self._call(self._stop)

    def stop(self, *, drain_s: float = 0.0) -> None:
        """Drain, and wait until it is done."""
        self.drain(drain_s)
        if self._thread.is_alive():
            self._thread.join()

    def wake(self) -> None:
        """Claim at once: rollouts were queued."""
        self._call(self._wake)

    def check(self) -> None:
        """Make sure that the runner still works.

        Raises:
            LightningError: why it stopped by itself.
        """
        if self._failure is not None:
            raise self._failure

    @property
    def alive(self) -> bool:
        """Whether the runner's thread runs."""
        return self._thread.is_alive()

    @property
    def attached(self) -> tuple[str, ...]:
        """The frameworks that were attached in the workers."""
        return self._fleet.attached

    @property
    def unrecorded(self) -> Mapping[str, int]:
        """Numbers of unrecorded calls in the workers that look like model calls, by host and path."""
        return self._fleet.unrecorded

    def describe(self) -> str:
        """Return what the workers do, for messages about stalls."""
        return self._fleet.describe()

    def _call(self, function: Callable[[], None]) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has just been closed
                self._loop.call_soon_threadsafe(function)

    def _stop(self) -> None:
        self._stopping.set()
        self._given.set()
        self._woken.set()

    def _begin(self) -> None:
        self._given.set()

    def _wake(self) -> None:
        self._woken.set()

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except LightningError as error:
            self._failure = type(error)(self._explain_error(str(error)))
        except BaseException as error:
            logger.exception("the runner failed")
            self._failure = LightningError(f"the runner failed: {type(error).__name__}: {error}")
        finally:
            self._ready.set()

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_default_executor(ThreadPoolExecutor(STORE_THREADS, thread_name_prefix="runner-store"))
        self._stopping, self._woken, self._given = asyncio.Event(), asyncio.Event(), asyncio.Event()
        beating = asyncio.create_task(self._beat())
        try:
            await self._fleet.start()
            self._ready.set()
            await self._given.wait()
            await self._claim_all()
            await self._drain()
        finally:
            await self._fleet.stop()
            if self._users is not None:
                await self._users.close()
            await self._settle(self._lease_s)
            beating.cancel()
            await asyncio.gather(beating, *self._tasks, return_exceptions=True)
            self._beats.shutdown(wait=False)

    async def _claim_all(self) -> None:
        idle = failures = 0
        while not self._stopping.is_set():
            if self._fleet.failure is not None:
                raise self._fleet.failure
            self._woken.clear()
            try:
                records = await self._claim(self._fleet.free())
            except ConfigError:
                raise
            except Exception as error:  # noqa: BLE001 - the store may be back soon: a runner outlives its server
                logger.warning("rollouts can't be claimed: %s", error)
                await self._pause(RETRY_S[min(failures, len(RETRY_S) - 1)])
                failures += 1
                continue
            failures = 0
            for record in records:
                self._fleet.place(record)
            idle = 0 if records else idle + 1
            await self._pause(IDLE_S[min(idle, len(IDLE_S) - 1)])

    async def _claim(self, limit: int) -> list[AttemptRecord]:
        if limit == 0:
            return []
        with stalls.waiting("runner claim", f"rollouts, from the store {_name(self._store)}"):
            return await self._ask(self._store.claim, self.name, limit=limit, lease_s=self._lease_s)

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._woken.wait(), seconds)

    async def _drain(self) -> None:
        began = time.monotonic()
        while self._fleet.held() and (left_s := began + self._drain_s - time.monotonic()) > 0:
            self._woken.clear()
            await self._pause(left_s)

    async def _settle(self, limit_s: float) -> None:
        """Wait until all ends are reported, at most `limit_s` seconds."""
        if self._tasks:
            _, left = await asyncio.wait(set(self._tasks), timeout=limit_s)
            for record in self._finishing.values():
                logger.error("the end of attempt %s can't be reported before the runner ends", record.attempt_id)
            for task in left:
                task.cancel()

    def _explain_error(self, error: str) -> str:
        return error if self._passed is None else explain_missing_variables(error, os.environ, self._passed)

    def _finish_attempt(self, record: AttemptRecord, ended: AttemptEnd) -> None:
        self.ended += 1
        if ended.error is not None:
            ended = replace(ended, error=self._explain_error(ended.error))
        self._finishing[record.attempt_id] = record
        task = asyncio.create_task(self._finish(record, ended))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._woken.set()  # there is room for another one

    async def _finish(self, record: AttemptRecord, ended: AttemptEnd) -> None:
        end = functools.partial(self._store.finish, status=ended.status, rewards=ended.rewards, error=ended.error)
        began, failures = time.monotonic(), 0
        wait = stalls.begin("runner result", f"the store {_name(self._store)} to take the end of {record.attempt_id}")
        try:
            while True:
                try:
                    await self._ask(end, record.attempt_id, record.fence)
                    return
                except LeaseLostError:
                    logger.info("the result of attempt %s arrived too late", record.attempt_id)
                    return
                except UnauthorizedError as error:  # the key may be renewed: the result is not at fault
                    logger.warning("the end of attempt %s can't be reported yet: %s", record.attempt_id, error)
                except RefusedError as error:
                    if ended.status == "failed":
                        logger.exception("the end of attempt %s is refused", record.attempt_id)
                        return
                    logger.warning("the end of attempt %s is refused: %s", record.attempt_id, error)
                    ended = AttemptEnd("failed", error=f"its end was refused: {error}")
                    end = functools.partial(self._store.finish, status="failed", error=ended.error)
                    continue
                except Exception as error:
                    if self._gives_up(began):
                        logger.exception("the end of attempt %s can't be reported", record.attempt_id)
                        return
                    logger.warning("the end of attempt %s can't be reported yet: %s", record.attempt_id, error)
                await asyncio.sleep(RETRY_S[min(failures, len(RETRY_S) - 1)])
                failures += 1
        finally:
            wait.end()
            self._finishing.pop(record.attempt_id, None)

    def _gives_up(self, began: float) -> bool:
        """Whether to give up an end that could not be reported since `began`; an unreachable server is waited for."""
        since = self._heard_since
        return since is not None and time.monotonic() > max(began, since) + self._lease_s

    async def _beat(self) -> None:
        """Renew the leases, and cancel attempts that have lost theirs."""
        while True:
            await asyncio.sleep(self._lease_s / 3)
            held = [*self._fleet.held(), *self._finishing.values()]
            if not held:
                continue
            leases = list({record.attempt_id: record.fence for record in held}.items())
            asked, since, self._heard_since = time.monotonic(), self._heard_since, None
            try:
                with stalls.waiting(
                    "runner heartbeat", f"the store {_name(self._store)} to renew {len(leases)} leases"
                ):
                    beat = functools.partial(self._store.heartbeat, leases, lease_s=self._lease_s)
                    lost = await asyncio.get_running_loop().run_in_executor(self._beats, beat)
            except Exception as error:  # noqa: BLE001 - the next beat may come through
                logger.warning("leases can't be renewed: %s", error)
                continue
            now = time.monotonic()
            self._heard_since = now if since is None or now - asked > self._lease_s / 3 else since
            for attempt_id in lost:
                self._fleet.cancel(attempt_id)

    @staticmethod
    async def _ask(function: Callable[..., T], *args: object, **options: object) -> T:
        return await asyncio.to_thread(function, *args, **options)


def _name(store: Store) -> str:
    return str(getattr(store, "name", type(store).__name__))
