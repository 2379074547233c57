"""One crash, hang, leaked thread or killed process costs one attempt and nothing else."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import pytest

from lightning_spans.errors import ConfigError
from lightning_spans.schema.attempts import AttemptRecord, Rollout
from lightning_spans.schema.rewards import Reward
from lightning_spans.store import Store, open_store
from lightning_trainer.runner import fleet
from lightning_trainer.runner.crashes import AttemptEnd, Victim, verdict
from lightning_trainer.runner.process import WorkerProcess
from lightning_trainer.runner.protocol import Message
from lightning_trainer.runner.runner import Runner
from lightning_trainer.runner.target import Job
from lightning_trainer.runner.worker.limits import WorkerLimits, parse_bytes
from lightning_trainer.runner.workers import Blocking, Death
from support.runners import enqueue, results, running, until

AGENTS = '''
import asyncio, ctypes, json, multiprocessing, os, subprocess, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from lightning_spans.record.context import current_attempt

POOL, ALL_AT_WORK = ThreadPoolExecutor(40), threading.Barrier(40)

async def run(task):
    how = task.get("how")
    if how == "wait":
        with open("waits", "a") as file:
            file.write(".")
        while not Path("go").exists():
            await asyncio.sleep(0.01)
    if how in ("block", "lock", "loop"):
        Path("go").touch()  # who waits can end now, but for this one
    if how == "block":
        time.sleep(task["s"])
    if how == "lock":
        ctypes.PyDLL(None).sleep(600)  # a call in C that keeps Python's lock
    while how == "loop":
        time.sleep(0.001)
    if how == "block in a child":
        async def child():
            time.sleep(task["s"])
        await asyncio.gather(child())
    if how == "late spans":
        from lightning_trainer.runner.worker import program
        class Recorder:
            class tracer:
                @staticmethod
                def flush(_):
                    while not Path("go").exists():
                        time.sleep(0.01)
                    return True
        program.live_recorder = lambda: Recorder
    if how in ("pool", "leak"):
        with open("workers", "a") as file:
            file.write(f"{os.getpid()}\\n")
    if how == "pool":
        list(POOL.map(lambda _: ALL_AT_WORK.wait(), range(40)))
    if how == "leak":
        for _ in range(40):
            threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    if how == "ugly error":
        raise ValueError("half an emoji: \\ud83d, a zero: \\0")
    if how == "ugly reward":
        return {"\\ud83d": 1.0}
    if how == "big":
        return float(task["n"] == 2 ** 80)
    if how == "memory":
        return float(len(bytearray(task["bytes"])) > 0)
    if how == "cores":
        return float(len(os.sched_getaffinity(0)))
    if how == "subprocess":
        note = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"
        child = [sys.executable, "-c", note]
        subprocess.Popen([*child, "child"])
        subprocess.Popen([*child, "detached"], start_new_session=True)
        subprocess.Popen(["sh", "-c", '"$0" -c "$1" orphan & true', sys.executable, note]).wait()
        await asyncio.create_subprocess_exec(*child, "asyncio", env={})
        while not all(os.path.exists(f) and open(f).read() for f in ("child", "detached", "orphan", "asyncio")):
            await asyncio.sleep(0.01)
    if how == "waits for a child":
        child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
        Path("waiting").touch()
        while not Path("go").exists():
            await asyncio.sleep(0.01)
        child.stdin.close()
        return float(child.wait() == 0)
    if how == "holds threads":
        def hold():
            while not Path("go").exists():
                time.sleep(0.01)
        held = [asyncio.get_running_loop().run_in_executor(None, hold) for _ in range(64)]
        Path("held").touch()
        await asyncio.gather(*held)
    if how == "ends a fork":
        fork = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
        fork.start()
        fork.terminate()
        fork.join()
    await asyncio.sleep(task.get("sleep", 0))
    return 1.0

async def who(task):
    """Says who it is from everywhere: itself, child tasks, threads."""
    seen = set()
    def look():
        seen.add(current_attempt().rollout_id)
    async def child(n):
        await asyncio.sleep(0.001 * n)
        look()
        await asyncio.to_thread(look)
    for _ in range(5):
        look()
        await asyncio.gather(*(child(n) for n in range(4)))
        await asyncio.sleep(0)
    return float(seen == {task["me"]})
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "faulty.py").write_text(AGENTS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def store(folder: Path) -> Iterator[Store]:
    store = open_store(str(folder / "store.db"))
    yield store
    store.close()


JOB = Job(target="faulty:run")


def ends(store: Store, ids: list[str]) -> list[list[str]]:
    return [[attempt.status for attempt in each] for each in results(store, ids)]


def until_they_wait(folder: Path, count: int) -> None:
    """Wait until so many attempts have begun in their worker: `running` only says that the runner claimed them."""
    file = folder / "waits"
    until(lambda: file.exists() and len(file.read_text()) == count)


def test_worker_killed_from_outside_costs_no_try_of_those_in_company(store: Store, folder: Path) -> None:
    ids = enqueue(store, [{"how": "wait"} for _ in range(6)], max_attempts=1)
    with running(store, JOB, folder) as runner:
        until_they_wait(folder, len(ids))
        os.kill(int(runner.describe().split()[1]), signal.SIGKILL)
        (folder / "go").touch()
        assert ends(store, ids) == [["disturbed", "succeeded"]] * 6


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "STALL_S", 1.5)
    monkeypatch.setattr(fleet, "STALL_ALONE_S", 1.5)
    monkeypatch.setattr(fleet, "APART_S", 1.5)


@pytest.mark.usefixtures("impatient")
def test_attempt_that_keeps_others_waiting_runs_again_alone_and_may_take_its_time(store: Store, folder: Path) -> None:
    patient = enqueue(store, [{"how": "wait"}, {"how": "wait"}], max_attempts=1)
    holds = enqueue(store, [{"how": "block", "s": 6}], max_attempts=1, timeout_s=600.0)
    with running(store, JOB, folder, concurrency=3):
        [[held, alone]] = results(store, holds)
        assert ends(store, patient) == [["released", "succeeded"]] * 2
    assert (held.status, alone.status) == ("disturbed", "succeeded")
    assert "blocked the event loop" in (held.error or "")
    assert "faulty.py" in (held.error or "")


class FakeWorker:
    """A worker whose attempts end never, or only up to the delivery of their spans.

    `seen` is set once the fleet has looked at its event loop repeatedly.
    """

    name, log, attached = "fake", "log", ()

    def __init__(self, *, blocked: bool = False, ends: bool = False) -> None:
        self.messages: asyncio.Queue[Message | None] = asyncio.Queue()
        self.seen, self.killed = asyncio.Event(), asyncio.Event()
        self._blocked, self._ends, self._busy, self._looks = blocked, ends, False, 0

    @property
    def blocking(self) -> Blocking | None:
        self._looks += self._busy
        if self._looks > 3:
            self.seen.set()
        return Blocking(1, 60.0, "agent.py:1") if self._blocked and self._busy else None

    def send(self, message: Message) -> None:
        self._busy = True
        if message["type"] == "run" and self._ends:
            reward = asdict(Reward(value=0.5, rollout_id="r", attempt_id="r.1"))
            self.messages.put_nowait(
                {"type": "flushing", "id": message["id"], "status": "succeeded", "rewards": [reward], "error": None}
            )

    async def receive(self) -> Message | None:
        return await self.messages.get()

    async def ended(self) -> Death:
        return Death("exit status 0")

    async def stop(self) -> None:
        self.kill()

    def kill(self) -> None:
        self.killed.set()
        self.messages.put_nowait(None)


def claimed(*, disturbed: int = 0, timeout_s: float | None = None) -> AttemptRecord:
    rollout = Rollout(rollout_id="r", group_id="g", task={}, timeout_s=timeout_s)
    return AttemptRecord(attempt_id="r.1", rollout=rollout, number=1, fence=1, worker="w", disturbed=disturbed)


@pytest.mark.parametrize("alone", [False, True], ids=["blocks its loop", "runs again alone"])
@pytest.mark.parametrize(("concurrency", "workers"), [(1, 1), (2, 2)])
async def test_worker_that_runs_one_attempt_at_a_time_gets_no_second_one_next_to_it(
    monkeypatch: pytest.MonkeyPatch, concurrency: int, workers: int, alone: bool
) -> None:
    monkeypatch.setattr(fleet, "APART_S", 0.0)
    started: list[FakeWorker] = []

    async def start(_: int) -> FakeWorker:
        started.append(FakeWorker(blocked=not alone))
        return started[-1]

    own = fleet.Fleet(start, workers=1, concurrency=concurrency, on_end=lambda *_: None)
    await own.start()
    own.place(claimed(disturbed=int(alone)))
    await started[0].seen.wait()
    assert len(started) == workers
    await own.stop()


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("how", ["lock", "loop"])
def test_attempt_that_never_ends_keeps_nobody_waiting(store: Store, folder: Path, how: str) -> None:
    holds = enqueue(store, [{"how": how}], max_attempts=1, timeout_s=600.0)
    others = enqueue(store, [{"how": "wait"} for _ in range(8)], max_attempts=1, timeout_s=600.0)
    with running(store, JOB, folder):
        assert [each[-1] for each in ends(store, others)] == ["succeeded"] * 8
        assert [one.status for one in store.attempts(rollout_ids=holds)][1:] in ([], ["running"])


@pytest.mark.usefixtures("impatient")
def test_attempt_that_never_ends_is_the_one_that_fails(store: Store, folder: Path) -> None:
    holds = enqueue(store, [{"how": "lock"}], max_attempts=1, timeout_s=8.0)
    others = enqueue(store, [{"how": "wait"} for _ in range(3)], max_attempts=1)
    with running(store, JOB, folder):
        assert ends(store, holds + others) == [["disturbed", "timeout"], *[["disturbed", "succeeded"]] * 3]


def test_spans_that_are_delivered_late_cost_no_attempt(store: Store, folder: Path) -> None:
    ids = enqueue(store, [{"how": "late spans"}], max_attempts=1, timeout_s=5.0)
    with running(store, JOB, folder):
        until(lambda: bool(store.attempts()))
        until(lambda: time.time_ns() > store.attempts()[0].started_ns + 6e9)
        (folder / "go").touch()
        assert ends(store, ids) == [["succeeded"]]
    assert [reward.value for reward in store.rewards()] == [1.0]


async def test_spans_that_are_never_delivered_cost_the_worker_and_no_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "FLUSH_S", -1.0)
    told: asyncio.Queue[AttemptEnd] = asyncio.Queue()
    started: list[FakeWorker] = []

    async def start(_: int) -> FakeWorker:
        started.append(FakeWorker(ends=True))
        return started[-1]

    own = fleet.Fleet(start, workers=1, concurrency=1, on_end=lambda _, end: told.put_nowait(end), grace_s=0.0)
    await own.start()
    own.place(claimed(timeout_s=1.0))
    end = await told.get()
    assert (end.status, [reward.value for reward in end.rewards]) == ("succeeded", [0.5])
    await started[0].killed.wait()
    await own.stop()


def test_attempt_that_keeps_the_threads_of_the_loop_busy_holds_up_no_end(
    store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "FLUSH_S", 600.0)
    holds = enqueue(store, [{"how": "holds threads"}], max_attempts=1)
    with running(store, JOB, folder):
        try:
            until((folder / "held").exists)
            assert ends(store, enqueue(store, [{}], max_attempts=1)) == [["succeeded"]]
            assert store.rollouts(rollout_ids=holds)[0].status == "running"
        finally:
            (folder / "go").touch()
        assert ends(store, holds) == [["succeeded"]]


@pytest.mark.parametrize("name", ["KILL", "TERM"])
def test_command_that_is_killed_fails_if_it_happens_again(store: Store, folder: Path, name: str) -> None:
    ids = enqueue(store, [{}], max_attempts=1)
    with running(store, Job(command=f"sh -c 'kill -{name} $$'"), folder):
        assert ends(store, ids) == [["disturbed", "failed"]]
    assert f"the command ended with signal SIG{name}" in (store.attempts(rollout_ids=ids)[1].error or "")


def test_worker_killed_from_outside_costs_no_try_of_the_one_that_ran_alone(store: Store, folder: Path) -> None:
    ids = enqueue(store, [{"how": "wait"}], max_attempts=1)
    with running(store, JOB, folder) as runner:
        until_they_wait(folder, len(ids))
        os.kill(int(runner.describe().split()[1]), signal.SIGKILL)
        (folder / "go").touch()
        assert ends(store, ids) == [["disturbed", "succeeded"]]


def test_where_nobody_knows_who_held_the_loop_each_runs_alone() -> None:
    def end(blocking: Blocking | None, **facts: Any) -> str:
        values = {"number": 7, "record": claimed(timeout_s=1.0), "company": 2, "told": False, "overdue": True, **facts}
        return verdict(Victim(**values), Death("signal SIGKILL"), stood_still=True, blocking=blocking).status

    assert end(None) == end(Blocking(None, 2.0, "x")) == "disturbed"
    assert end(None, company=1) == "timeout"
    assert end(Blocking(7, 2.0, "x")) == "timeout"
    assert end(Blocking(7, 2.0, "x"), overdue=False) == "disturbed"
    assert end(Blocking(8, 2.0, "x")) == "released"
    assert end(None, told=True) == "timeout"


def test_what_a_lost_machine_ran_is_released() -> None:
    victim = Victim(number=1, record=claimed(timeout_s=1.0), company=1, told=False, overdue=False)
    lost = Death("the loss of its node", outside=True)
    assert verdict(victim, lost, stood_still=False, blocking=None).status == "released"


def test_threads_left_behind_cost_the_process_and_no_attempt(store: Store, folder: Path) -> None:
    """Those of a pool are not left behind: the next attempt uses them again."""
    slow = enqueue(store, [{"how": "wait"}], max_attempts=1)
    with running(store, JOB, folder):
        for how in ("pool", "pool", "pool", "leak", "leak", "leak"):
            assert ends(store, enqueue(store, [{"how": how}], max_attempts=1)) == [["succeeded"]]
        (folder / "go").touch()
        assert ends(store, slow) == [["succeeded"]]
    *first, last = (folder / "workers").read_text().split()
    assert len(set(first)) == 1
    assert last not in first


@pytest.mark.parametrize(
    ("task", "status"),
    [
        ({"how": "ugly error"}, "failed"),
        ({"how": "ugly reward"}, "succeeded"),
        ({"how": "big", "n": 2**80}, "succeeded"),
        ({"x": "\ud83d"}, "succeeded"),
    ],
)
def test_text_and_numbers_that_json_can_not_hold_come_through(
    store: Store, folder: Path, task: dict[str, Any], status: str
) -> None:
    ids = enqueue(store, [task, {}], max_attempts=1, timeout_s=20.0)
    with running(store, JOB, folder):
        assert ends(store, ids) == [[status], ["succeeded"]]


def test_every_attempt_knows_itself_in_tasks_and_threads(store: Store, folder: Path) -> None:
    pytest.importorskip("openai")
    (folder / "attached.py").write_text("import lightning_openai\nlightning_openai.attach()\nfrom faulty import who\n")
    ids = [f"m{n}" for n in range(40)]
    store.enqueue([Rollout(rollout_id=i, group_id="g", task={"me": i}, max_attempts=1) for i in ids])
    with running(store, Job(target="attached:who"), folder, concurrency=20):
        assert ends(store, ids) == [["succeeded"]] * 40
    assert [reward.value for reward in store.rewards()] == [1.0] * 40


def test_worker_over_its_memory_fails_the_attempt_and_goes_on(store: Store, folder: Path) -> None:
    ids = enqueue(store, [{"how": "memory", "bytes": 800 << 20}, {"how": "memory", "bytes": 1 << 20}], max_attempts=1)
    with running(store, JOB, folder, limits=WorkerLimits(memory_bytes=500 << 20)) as runner:
        pid = runner.describe().split()[1]
        assert ends(store, ids) == [["failed"], ["succeeded"]]
        assert runner.describe().split()[1] == pid
    assert "MemoryError" in (store.attempts(rollout_ids=ids[:1])[0].error or "")


def test_workers_keep_to_their_cores(store: Store, folder: Path) -> None:
    ids = enqueue(store, [{"how": "cores"}], max_attempts=1)
    with running(store, JOB, folder, limits=WorkerLimits(cores=1)):
        assert ends(store, ids) == [["succeeded"]]
    assert [reward.value for reward in store.rewards()] == [1.0]


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        (WorkerLimits(memory_bytes=1000), "needs more"),
        (WorkerLimits(cores=10_000), "worker-cores"),
        (WorkerLimits(cores=0), "1 to"),
    ],
)
def test_limits_that_make_no_sense_are_refused(folder: Path, limits: WorkerLimits, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Runner(JOB, workers=1, concurrency=1, logs=folder / "logs", limits=limits)


def test_limits_are_refused_where_the_system_does_not_keep_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    WorkerLimits().check()
    with pytest.raises(ConfigError, match="need Linux"):
        WorkerLimits(memory_bytes=1 << 30).check()


def test_sizes_are_read_with_their_units() -> None:
    assert [parse_bytes(text) for text in ("1024", "1k", "2 MB", "1.5GiB")] == [1024, 1024, 2 << 20, 3 << 29]
    with pytest.raises(ConfigError, match="800M"):
        parse_bytes("much")


def test_worker_that_can_not_be_started_is_tried_again(
    store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, refused = WorkerProcess.start, []

    async def stingy(*args: Any, **options: Any) -> WorkerProcess:
        if options.get("number") == 0 and len(refused) < 1 and store.attempts():
            refused.append(True)
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return await start(*args, **options)

    monkeypatch.setattr(WorkerProcess, "start", stingy)
    ids = enqueue(store, [{"how": "wait"} for _ in range(2)], max_attempts=1)
    with running(store, JOB, folder) as runner:
        until_they_wait(folder, len(ids))
        os.kill(int(runner.describe().split()[1]), signal.SIGKILL)
        (folder / "go").touch()
        assert ends(store, ids) == [["disturbed", "succeeded"]] * 2
    assert refused


def test_runner_gives_up_when_no_worker_can_be_started_any_more(store: Store, folder: Path) -> None:
    enqueue(store, [{"sleep": 60}])
    with running(store, JOB, folder) as runner:
        until(lambda: store.rollouts()[0].status == "running")
        (folder / "faulty.py").write_text("import os\nos._exit(4)\n")
        os.kill(int(runner.describe().split()[1]), signal.SIGKILL)
        until(lambda: not runner.alive)
        with pytest.raises(ConfigError, match="exit status 4"):
            runner.check()
    assert store.rollouts()[0].status in {"failed", "queued"}


def test_draining_runner_claims_no_more(store: Store, folder: Path) -> None:
    first = enqueue(store, [{"sleep": 1.5}], max_attempts=1)
    with running(store, JOB, folder) as runner:
        until(lambda: store.rollouts(rollout_ids=first)[0].status == "running")
        stopping = threading.Thread(target=runner.stop, kwargs={"drain_s": 20.0})
        stopping.start()
        later = enqueue(store, [{}])
        stopping.join()
    assert store.rollouts(rollout_ids=first)[0].status == "succeeded"
    assert store.rollouts(rollout_ids=later)[0].status == "queued"


@pytest.mark.parametrize("signals", [1, 2])
def test_runner_told_to_end_finishes_what_runs_and_a_second_time_releases_it(
    store: Store, folder: Path, signals: int
) -> None:
    from support.fakes import served

    with served(folder) as server:
        ids = [f"d{n}" for n in range(3)]
        tasks = [{"sleep": 2.0 if signals == 1 else 60.0}] * 3
        server.store.enqueue([Rollout(rollout_id=i, group_id="g", task=t) for i, t in zip(ids, tasks, strict=True)])
        command = [sys.executable, "-m", "lightning_trainer.cli", "runner", "faulty:run", "--server", server.url]
        command += ["--workers", "1", "--concurrency", "3"]  # no place is free
        env = {**os.environ, "LIGHTNING_KEY": server.keys.issue("runner")}
        with subprocess.Popen(command, env=env, stdout=subprocess.PIPE) as process:
            until(lambda: all(r.status == "running" for r in server.store.rollouts(rollout_ids=ids)), 60.0)
            server.store.enqueue([Rollout(rollout_id="later", group_id="g", task={})])
            for _ in range(signals):
                process.send_signal(signal.SIGTERM)
                threading.Event().wait(1.0)
            assert process.wait(30) == 0
        expected = "succeeded" if signals == 1 else "queued"
        assert {r.status for r in server.store.rollouts(rollout_ids=ids)} == {expected}
        if signals == 2:
            assert {a.status for a in server.store.attempts(rollout_ids=ids)} == {"released"}
            assert server.store.rollouts(rollout_ids=["later"])[0].status == "queued"


@pytest.mark.parametrize("isolate", [False, True], ids=["shared", "isolated"])
def test_attempt_continues_if_its_worker_is_told_to_end_with_the_runner(
    store: Store, folder: Path, *, isolate: bool
) -> None:
    """A service manager sends SIGTERM to all processes of a service."""
    ids = enqueue(store, [{"how": "wait"}], max_attempts=1)
    with running(store, Job(target="faulty:run", isolate=isolate), folder, workers=1, concurrency=1) as runner:
        until_they_wait(folder, len(ids))
        worker = psutil.Process(int(runner.describe().split()[1]))
        for process in (worker, *worker.children(recursive=True)):
            process.send_signal(signal.SIGTERM)
        (folder / "go").touch()
        assert ends(store, ids) == [["succeeded"]]


@pytest.mark.parametrize("isolate", [False, True], ids=["shared", "isolated"])
def test_what_an_attempt_forks_ends_with_sigterm(store: Store, folder: Path, *, isolate: bool) -> None:
    ids = enqueue(store, [{"how": "ends a fork"}], max_attempts=1, timeout_s=60.0)
    with running(store, Job(target="faulty:run", isolate=isolate), folder, workers=1, concurrency=1):
        assert ends(store, ids) == [["succeeded"]]


def _alive(name: str) -> bool:
    """Whether the process whose number is in this file runs."""
    try:
        return psutil.Process(int(Path(name).read_text())).status() != psutil.STATUS_ZOMBIE
    except (psutil.NoSuchProcess, ValueError):
        return False


def test_what_an_attempt_starts_is_ended_with_it_and_nothing_of_another(store: Store, folder: Path) -> None:
    ids = enqueue(store, [{"how": "waits for a child"}, {"how": "subprocess"}], max_attempts=1)

    with running(store, JOB, folder, workers=1, concurrency=2):
        until(lambda: store.rollouts(rollout_ids=ids[1:])[0].status == "succeeded")
        assert not any(map(_alive, ("child", "detached", "orphan", "asyncio")))
        Path("go").touch()
        assert ends(store, ids[:1]) == [["succeeded"]]
    assert [reward.value for reward in store.rewards(rollout_ids=ids[:1])] == [1.0]


def test_what_an_attempt_started_does_not_outlive_a_worker_that_dies(store: Store, folder: Path) -> None:
    enqueue(store, [{"how": "subprocess", "sleep": 600}], max_attempts=1)
    with running(store, JOB, folder, workers=1) as runner:
        until(lambda: all(Path(name).exists() and _alive(name) for name in ("detached", "orphan", "asyncio")))
        os.kill(int(runner.describe().split()[1]), signal.SIGKILL)
        until(lambda: not any(map(_alive, ("detached", "orphan", "asyncio"))))
