"""Workers as actors of a Ray cluster. Ray finds machines with room, moves code there, and reports when one has died."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from lightning_spans import errors
from lightning_spans.errors import ConfigError, LightningError
from lightning_spans.record.attach import attached_frameworks
from lightning_spans.record.stalls import waiting
from lightning_trainer.runner.environment import without_keys
from lightning_trainer.runner.protocol import Message
from lightning_trainer.runner.target import Job
from lightning_trainer.runner.worker.execution import in_loop_or_thread
from lightning_trainer.runner.worker.limits import NO_LIMITS, WorkerLimits
from lightning_trainer.runner.worker.program import WorkerProgram as Running
from lightning_trainer.runner.worker.program import load_job
from lightning_trainer.runner.worker.subprocesses import WORKER
from lightning_trainer.runner.workers import Blocking, Death

STOP_S: Final = 8.0
NODE_S: Final = 10.0  # after the death of an actor, the cluster notices within this time that its machine is gone
UNREACHED_S: Final = 60.0  # an actor that does not answer for this long is given up
REACH_S: Final = 10.0
CALLS: Final = 10_000  # concurrent calls of an actor: each attempt is one message, which does not wait for the attempt


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """What Ray needs to place each worker.

    Attributes:
        cpus: cores that Ray reserves for it.
        memory_bytes: memory that Ray reserves for it; None: none.
        environment: Ray's ``runtime_env``: ``working_dir``, ``pip``, ``env_vars``, ...; empty: the runner's folder,
            which must exist on every machine.
    """

    cpus: float = 1.0
    memory_bytes: int | None = None
    environment: dict[str, Any] = field(default_factory=dict)


def connect(address: str | None) -> int:
    """Join a cluster, and return its number of cores.

    Args:
        address: address of the cluster; None: the one that Ray finds (``RAY_ADDRESS``, or one on this machine);
            ``local`` starts one here, which ends with this process.

    Raises:
        ConfigError: Ray is not installed, or there is no cluster.
    """
    try:
        import ray
    except ImportError:
        raise ConfigError('--ray needs Ray: pip install "lightning-trainer[ray]"') from None
    try:
        _reach(address or os.environ.get("RAY_ADDRESS", ""))
        ray.init(address=address or "auto", log_to_driver=False, logging_level="warning", ignore_reinit_error=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"no Ray cluster is reached at {address or 'RAY_ADDRESS or this machine'}: {error}. Start one with"
            " `ray start --head`, name it with --ray-address, or use --ray-address local."
        ) from None
    return max(1, int(ray.cluster_resources().get("CPU", 1)))


def _reach(address: str) -> None:
    """Make sure that something listens there: Ray itself keeps trying for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=REACH_S).close()


class Actor:
    """The actor on the cluster: the agent, and its attempts on the actor's event loop."""

    def __init__(self, settings: Message) -> None:
        """Import the agent; `begin` reports any error."""
        for name in os.environ.keys() - without_keys(os.environ).keys():
            del os.environ[name]
        os.environ.setdefault("OPENAI_API_KEY", "none")
        os.environ[WORKER] = str(os.getpid())
        self._said: deque[tuple[int, Message]] = deque()
        self._count = 0
        self._news: asyncio.Event | None = None
        self._job = Job(**settings["job"])
        self._threads = ThreadPoolExecutor(settings["concurrency"], thread_name_prefix="attempt")
        self._running: Running | None = None
        self._refused: LightningError | None = None
        try:
            _enter(settings["folder"])
            WorkerLimits(**settings["limits"]).apply(settings["n"])
            agent, score = load_job(self._job, partial(in_loop_or_thread, threads=self._threads))
        except LightningError as error:
            self._refused = error
            return
        self._running = Running(
            agent, score, needs_reward=self._job.needs_reward and not self._job.judged, send=self._say
        )

    async def begin(self) -> Message:
        """Return that it is ready, or the agent's error, and where it runs."""
        import ray

        node = ray.get_runtime_context().get_node_id()
        where = {"node": node, "name": f"{os.getpid()} on {socket.gethostname()}"}
        if self._refused is not None:
            return {"type": "refused", "kind": type(self._refused).__name__, "message": str(self._refused)}
        return {"type": "ready", "attached": attached_frameworks(), **where}

    async def put(self, message: Message) -> None:
        """Take a message from the runner."""
        if self._running is not None:
            self._running.take(message)

    async def take(self, heard: int) -> list[tuple[int, Message]]:
        """Return the pending messages, numbered, and wait until there are any.

        Args:
            heard: number of the last message that was received; later ones are returned again.
        """
        if self._news is None:
            self._news = asyncio.Event()
        while self._said and self._said[0][0] <= heard:
            self._said.popleft()
        while not self._said:
            self._news.clear()
            await self._news.wait()
        return list(self._said)

    async def stop(self) -> None:
        """Cancel what runs, and deliver the spans so far."""
        if self._running is not None:
            await self._running.stop()

    def _say(self, message: Message) -> None:
        self._count += 1
        self._said.append((self._count, message))
        if self._news is not None:
            self._news.set()


def _enter(folder: str | None) -> None:
    if folder is None:
        return
    if not Path(folder).is_dir():
        raise ConfigError(
            f"{folder} is not on {socket.gethostname()}. Share it between the machines, or let Ray carry it there:"
            """ --ray-env '{"working_dir": "."}'"""
        )
    os.chdir(folder)


class RayWorker:
    """One actor, seen from the runner. Created by `start`."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._said: deque[Message] = deque()
        self._heard = 0
        self._node = ""
        self._failure = ""
        self.name = "?"
        self.attached: tuple[str, ...] = ()
        self.blocking: Blocking | None = None  # an actor cannot report it: that would need its one event loop

    @classmethod
    async def start(
        cls,
        job: Job,
        concurrency: int,
        *,
        number: int,
        limits: WorkerLimits = NO_LIMITS,
        placement: Placement,
    ) -> RayWorker:
        """Start an actor where the cluster has room, and wait until it has imported the agent.

        Raises:
            LightningError: the agent cannot be imported or called, in the words of the actor, or the actor died.
        """
        import ray

        folder = None if "working_dir" in placement.environment else str(Path.cwd())
        settings = {
            "job": asdict(job), "concurrency": concurrency, "folder": folder, "limits": asdict(limits), "n": number,
        }  # fmt: skip
        actor = (
            ray.remote(Actor)
            .options(
                num_cpus=placement.cpus,
                memory=placement.memory_bytes,
                max_concurrency=CALLS,
                max_restarts=0,
                scheduling_strategy="SPREAD",
                runtime_env=placement.environment or None,
            )
            .remote(settings)
        )
        worker = cls(actor)
        try:
            with waiting("ray actor", f"the cluster to start worker {number}, which needs {placement.cpus:g} cores"):
                answer = await actor.begin.remote()
            if answer["type"] == "refused":
                kind = getattr(errors, answer["kind"], ConfigError)
                raise (kind if issubclass(kind, LightningError) else ConfigError)(answer["message"])
        except ray.exceptions.RayError as error:
            worker.kill()
            raise ConfigError(f"a worker on Ray ended while it imported the agent: {error}") from None
        except BaseException:
            worker.kill()
            raise
        worker.attached, worker.name, worker._node = tuple(answer["attached"]), answer["name"], answer["node"]
        return worker

    @property
    def log(self) -> str:
        """Where the agent's output can be read."""
        return f"`ray logs actor --id {self._actor._actor_id.hex()}`"

    def send(self, message: Message) -> None:
        """Send a message; an actor that has ended does not get it, which `receive` reports."""
        self._actor.put.remote(message)

    async def receive(self) -> Message | None:
        """Return the next message; None if the actor has ended."""
        import ray

        since: float | None = None
        while not self._said:
            try:
                said = await self._actor.take.remote(self._heard)
            except ray.exceptions.ActorUnavailableError as error:  # perhaps only its connection broke
                now = time.monotonic()
                since = since or now
                if now - since > UNREACHED_S:
                    self._failure = _first_line(error)
                    return None
                await asyncio.sleep(0.5)
            except ray.exceptions.RayError as error:
                self._failure = _first_line(error)
                return None
            else:
                self._said.extend(message for number, message in said if number > self._heard)
                self._heard = said[-1][0]
        return self._said.popleft()

    async def ended(self) -> Death:
        """Return how it ended: by itself, or with its machine."""
        self.kill()
        until = time.monotonic() + NODE_S
        while time.monotonic() < until:
            if "its node has died" in self._failure or not await asyncio.to_thread(_alive, self._node):
                return Death("the loss of its node", outside=True)
            if "its worker process has died" in self._failure:
                return Death("the end of its process: see Ray's log")
            await asyncio.sleep(0.5)
        return Death(self._failure or "no word")

    async def stop(self) -> None:
        """Let the actor deliver its spans and end; kill it if it does not."""
        import ray

        with contextlib.suppress(TimeoutError, ray.exceptions.RayError):
            await asyncio.wait_for(self._actor.stop.remote(), STOP_S)
        self.kill()

    def kill(self) -> None:
        """Kill the actor at once."""
        import ray

        ray.kill(self._actor, no_restart=True)


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split())[:500] or type(error).__name__


def _alive(node: str) -> bool:
    import ray

    return any(found["NodeID"] == node and found["Alive"] for found in ray.nodes())
