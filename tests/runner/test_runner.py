from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from lightning_conformance import ScriptedServer
from lightning_spans import emit_reward
from lightning_spans.errors import ConfigError, StoreError, UnauthorizedError
from lightning_spans.schema.attempts import Attempt, AttemptRecord
from lightning_spans.store import Store, open_store
from lightning_trainer.runner import runner as runners
from lightning_trainer.runner.fleet import Fleet
from lightning_trainer.runner.process import WorkerProcess
from lightning_trainer.runner.protocol import attempt_to_json
from lightning_trainer.runner.target import Job
from lightning_trainer.runner.worker import execution
from support.runners import enqueue, results, running, until

AGENTS = '''
import asyncio, ctypes, os, signal, sys, threading, time
from pathlib import Path
from lightning_spans import emit_reward
from lightning_spans.record.context import current_attempt

async def async_run(task):
    await asyncio.sleep(0)
    return task["x"]

def sync_run(task):
    return {"writer": task["x"], "rewriter": 0.5}

def prints(task):
    print("\\x00\\x00\\x00\\x05 not a message", flush=True)
    print("to stderr", file=sys.stderr, flush=True)
    os.write(1, b"straight to the descriptor\\n")
    return 1.0

def meet(task):
    """Ends only while `task["party"]` attempts are here at once."""
    here = Path(task["folder"]) / current_attempt().attempt_id
    here.touch()
    while len(list(here.parent.iterdir())) < task["party"]:
        time.sleep(0.01)
    return 1.0

async def async_meet(task):
    here = Path(task["folder"]) / current_attempt().attempt_id
    here.touch()
    while len(list(here.parent.iterdir())) < task["party"]:
        await asyncio.sleep(0.01)
    return 1.0

def alarms(task):
    """Works in the main thread alone."""
    signal.signal(signal.SIGALRM, lambda *_: None)
    return asyncio.run(async_run({"x": 0.5}))

async def async_alarms(task):
    signal.signal(signal.SIGALRM, lambda *_: None)
    return await async_run({"x": 0.5})

def wrapped_alarms(task, result):
    try:
        alarms(task)
    except ValueError:
        raise RuntimeError("not in threads")
    (Path(task["folder"]) / str(os.getpid())).touch()
    return 2 * result

def other_value_error(task):
    raise ValueError("the main thread of the story is missing")

async def sleeps_and_says_so(task):
    (folder := Path(task["folder"])).joinpath("began").touch()
    try:
        await asyncio.sleep(600)
    finally:
        (folder / "cancelled").touch()

async def behave(task):
    how, flag = task["how"], Path(task.get("flag", "/nonexistent/flag"))
    if how == "sleep":
        await asyncio.sleep(60)
    if how == "brief":
        await asyncio.sleep(task.get("s", 1.0))
    if how == "block":
        time.sleep(60)
    if how == "block in a library":
        threading.Event().wait(60)
    if how == "exit" or (how == "exit once" and not flag.exists()):
        flag.parent.is_dir() and flag.touch()
        os._exit(3)
    if how == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if how == "end the parent":
        flag.write_text(str(os.getpid()))
        os.kill(os.getppid(), signal.SIGKILL)
        await asyncio.sleep(60)
    if how == "sys.exit":
        sys.exit("enough")
    if how == "cancel itself":
        raise asyncio.CancelledError
    if how == "swallow":
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            return 1.0
    if how == "raise":
        raise ValueError("no good answer")
    if how == "emit":
        emit_reward(0.25)
        emit_reward(0.5, agent="writer")
        return None
    return task.get("value", 1.0)

def hang_or_not(task):
    time.sleep(60 if task["hang"] else task.get("s", 0.0))
    return 1.0

def stop_iteration(task):
    raise StopIteration

def change(task):
    task["x"] = 99
    return "changed"

def score(task, result):
    return float(task["x"]) if result == "changed" else 0.0

async def async_score(task, result):
    return {"writer": float(task["x"])}

def environment(task):
    return float("LIGHTNING_KEY" in os.environ)
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "agents.py").write_text(AGENTS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def store(folder: Path) -> Iterator[Store]:
    store = open_store(str(folder / "store.db"))
    yield store
    store.close()


def run(store: Store, folder: Path, target: str, *tasks: dict[str, Any], reward: str | None = None, **options: Any):
    rollout = {"max_attempts": options.pop("max_attempts", 1), "timeout_s": options.pop("timeout_s", 20.0)}
    ids = enqueue(store, list(tasks), **rollout)
    job = Job(target=f"agents:{target}", reward=reward, isolate=options.pop("isolate", False))
    with running(store, job, folder, **options):
        return results(store, ids)


def rewards(store: Store) -> list[tuple[str, str | None, float, str]]:
    return sorted((r.rollout_id, r.agent or "", r.value, r.source) for r in store.rewards())


@pytest.mark.parametrize("target", ["async_run", "sync_run"])
def test_agent_runs_and_its_rewards_are_kept(store: Store, folder: Path, target: str) -> None:
    attempts = run(store, folder, target, {"x": 0.25}, {"x": 0.75})
    assert [[a.status for a in each] for each in attempts] == [["succeeded"], ["succeeded"]]
    expected = {
        "async_run": [("r0", "", 0.25, "run"), ("r1", "", 0.75, "run")],
        "sync_run": [
            ("r0", "rewriter", 0.5, "run"),
            ("r0", "writer", 0.25, "run"),
            ("r1", "rewriter", 0.5, "run"),
            ("r1", "writer", 0.75, "run"),
        ],
    }
    assert rewards(store) == expected[target]


@pytest.mark.parametrize("target", ["meet", "async_meet"])
def test_attempts_of_one_worker_run_at_once_and_each_knows_its_own(store: Store, folder: Path, target: str) -> None:
    (folder / "party").mkdir()
    attempts = run(store, folder, target, *({"folder": str(folder / "party"), "party": 6} for _ in range(6)))
    assert all(each[0].status == "succeeded" for each in attempts)
    assert {path.name for path in (folder / "party").iterdir()} == {each[0].attempt_id for each in attempts}


def test_runner_without_workers_leaves_rollouts_to_those_elsewhere(store: Store, folder: Path) -> None:
    ids = enqueue(store, [{"x": 1.0}])
    with running(store, Job(target="agents:sync_run"), folder, workers=0) as here:
        with running(store, Job(target="agents:sync_run"), folder) as elsewhere:
            (attempts,) = results(store, ids)
        here.check()
        assert (here.ended, elsewhere.ended) == (0, 1)
    assert [attempt.status for attempt in attempts] == ["succeeded"]


def test_what_agents_print_goes_to_the_log(store: Store, folder: Path) -> None:
    [[attempt]] = run(store, folder, "prints", {})
    assert attempt.status == "succeeded"
    log = (folder / "logs" / "worker-0.log").read_text()
    assert "not a message" in log
    assert "to stderr" in log
    assert "straight to the descriptor" in log


def test_raising_agent_fails_its_attempts_with_its_traceback(store: Store, folder: Path) -> None:
    [attempts] = run(store, folder, "behave", {"how": "raise"}, max_attempts=2)
    assert [a.status for a in attempts] == ["failed", "failed"]
    assert "no good answer" in (attempts[0].error or "")
    assert "agents.py" in (attempts[0].error or "")
    assert "execution.py" not in (attempts[0].error or "")
    assert store.rewards() == []


@pytest.mark.parametrize(
    ("target", "task", "named"),
    [
        ("behave", {"how": "sys.exit"}, "SystemExit: enough"),
        ("stop_iteration", {}, "StopIteration"),
        ("behave", {"how": "cancel itself"}, "CancelledError"),
    ],
)
def test_whatever_an_agent_raises_costs_its_attempt_alone(
    store: Store, folder: Path, target: str, task: dict[str, Any], named: str
) -> None:
    other = {"how": "brief"}
    [[attempt], [beside]] = run(store, folder, target, task, task | other)
    assert attempt.status == "failed"
    assert named in (attempt.error or "")
    assert target == "stop_iteration" or beside.status == "succeeded"


@pytest.mark.parametrize(
    ("value", "named"),
    [(None, "reward is None"), ("good", "not a number"), ({}, "is empty"), ({"writer": None}, "reward of 'writer'")],
)
def test_attempt_without_a_usable_reward_fails_and_says_why(store: Store, folder: Path, value: Any, named: str) -> None:
    [[attempt]] = run(store, folder, "behave", {"how": "", "value": value})
    assert attempt.status == "failed"
    assert (attempt.error or "").startswith("RewardError: ")
    assert named in (attempt.error or "")


def test_rewards_are_not_needed_where_one_only_looks(store: Store, folder: Path) -> None:
    """None at all, that is: a wrong one would be refused in training, and is told."""
    ids = enqueue(store, [{"how": "", "value": None}, {"how": "", "value": "text"}, {"how": "", "value": 1}])
    with running(store, Job(target="agents:behave", needs_reward=False), folder):
        assert [each[0].status for each in results(store, ids)] == ["succeeded", "failed", "succeeded"]
    assert rewards(store) == [("r2", "", 1.0, "run")]


def test_emitted_rewards_travel_with_the_result(store: Store, folder: Path) -> None:
    [[attempt]] = run(store, folder, "behave", {"how": "emit"})
    assert attempt.status == "succeeded"
    assert rewards(store) == [("r0", "", 0.25, "emit_reward"), ("r0", "writer", 0.5, "emit_reward")]


async def test_a_reward_function_that_is_called_again_counts_what_it_emits_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(execution, "SCORE_AGAIN_S", (0.0,))
    tries = iter([ConnectionError("the judge is busy"), None])

    async def answer(task: dict[str, Any], attempt: Attempt) -> str:
        emit_reward(0.5)
        return "answer"

    async def style(task: dict[str, Any], result: str) -> float:
        emit_reward(0.25, agent="writer")
        if (error := next(tries)) is not None:
            raise error
        return 1.0

    ended = await execution.execute(answer, style, {}, Attempt("r", "a"), needs_reward=True)
    assert [(each.agent, each.value) for each in ended.rewards] == [(None, 0.5), ("writer", 0.25), (None, 1.0)]


@pytest.mark.parametrize(
    ("function", "expected"), [("score", ("r0", "", 3.0, "score")), ("async_score", ("r0", "writer", 3.0, "score"))]
)
def test_reward_function_gets_the_unchanged_task_and_the_result(
    store: Store, folder: Path, function: str, expected: Any
) -> None:
    run(store, folder, "change", {"x": 3}, reward=f"agents:{function}")
    assert rewards(store) == [expected]


def test_attempt_over_its_time_ends_and_is_tried_again(store: Store, folder: Path) -> None:
    [attempts, [quick]] = run(store, folder, "behave", {"how": "sleep"}, {"how": ""}, max_attempts=2, timeout_s=0.3)
    assert [a.status for a in attempts] == ["timeout", "timeout"]
    assert "0.3 s" in (attempts[0].error or "")
    assert quick.status == "succeeded"


def test_result_after_the_time_limit_does_not_count(store: Store, folder: Path) -> None:
    [[attempt]] = run(store, folder, "behave", {"how": "swallow"}, timeout_s=0.2)
    assert attempt.status == "timeout"
    assert store.rewards() == []


def test_hanging_thread_costs_nobody_else(store: Store, folder: Path) -> None:
    slow = enqueue(store, [{"hang": False, "s": 2.0}], timeout_s=20.0, max_attempts=1)
    hung = enqueue(store, [{"hang": True}], timeout_s=0.2, max_attempts=1)
    with running(store, Job(target="agents:hang_or_not"), folder) as runner:
        first = runner.describe()
        assert results(store, hung)[0][0].status == "timeout"
        after = enqueue(store, [{"hang": False}], max_attempts=1)
        assert results(store, after)[0][0].status == "succeeded"
        assert results(store, slow)[0][0].status == "succeeded"
        until(lambda: runner.describe().count("worker ") == 1)
        assert runner.describe().split()[1] != first.split()[1]


@pytest.mark.parametrize("how", ["block", "block in a library"])
def test_blocked_event_loop_is_ended_and_its_neighbours_run_again(store: Store, folder: Path, how: str) -> None:
    beside = enqueue(store, [{"how": "brief", "s": 1.0}], timeout_s=20.0, max_attempts=1)
    blocks = enqueue(store, [{"how": how}], timeout_s=2.0, max_attempts=1)
    with running(store, Job(target="agents:behave"), folder):
        [blocked] = results(store, blocks)
        [neighbour] = results(store, beside)
    assert [a.status for a in blocked] == ["timeout"]
    assert re.search(r"agents\.py:\d+ in behave$", blocked[0].error or ""), "the program's own line"
    assert [a.status for a in neighbour] == ["released", "succeeded"]


@pytest.mark.skipif(sys.platform != "linux", reason="an isolated worker is a child of its process on Linux alone")
@pytest.mark.parametrize(
    ("how", "named"), [("exit", "exit status 3"), ("segfault", "SIGSEGV"), ("end the parent", "SIGKILL")]
)
def test_end_of_an_isolated_worker_is_told_as_it_was_and_takes_all_of_it(
    store: Store, folder: Path, how: str, named: str
) -> None:
    task = {"how": how, "flag": str(folder / "pid")}
    [attempts] = run(store, folder, "behave", task, isolate=True)
    killed = ["disturbed"] if how == "end the parent" else []  # the first time, anybody may have done it
    assert [attempt.status for attempt in attempts] == [*killed, "failed"]
    assert named in (attempts[-1].error or "")
    if how == "end the parent":
        until(lambda: has_ended(int((folder / "pid").read_text())))


@pytest.mark.parametrize("target", ["alarms", "async_alarms"])
def test_isolated_functions_have_the_main_thread_of_a_process_for_each_attempt(
    store: Store, folder: Path, target: str
) -> None:
    (pids := folder / "pids").mkdir()
    tasks = [{"folder": str(pids)}] * 3
    attempts = run(store, folder, target, *tasks, reward="agents:wrapped_alarms", isolate=True)
    assert [[a.status for a in each] for each in attempts] == [["succeeded"]] * 3
    assert {reward.value for reward in store.rewards()} == {1.0}
    assert len(list(pids.iterdir())) == 3


def test_isolated_async_agent_is_cancelled_when_its_time_is_up(store: Store, folder: Path) -> None:
    task = {"folder": str(folder)}
    [[attempt]] = run(store, folder, "sleeps_and_says_so", task, isolate=True, timeout_s=2.0, grace_s=30.0)
    assert attempt.status == "timeout"
    assert (folder / "cancelled").exists()


def test_signal_outside_the_main_thread_is_told_with_the_option_that_helps(store: Store, folder: Path) -> None:
    task = {"folder": str(folder), "x": 0.5}
    first = run(store, folder, "alarms", task)
    second = run(store, folder, "sync_run", task, reward="agents:wrapped_alarms")
    other = run(store, folder, "other_value_error", task)
    told = [(attempt.error or "").splitlines()[-1] for [[attempt]] in (first, second, other)]
    assert ["--isolate" in line for line in told] == [True, True, False]
    assert told[1].startswith("RuntimeError: not in threads")


FORKS = """
import multiprocessing, os, time
from pathlib import Path

here = Path(__file__).parent
os.register_at_fork(before=(here / "forking").touch)  # the last to be registered is the first to be called

def child(queue):
    import slow
    queue.put(slow.X)

def run(task):
    if task["how"] == "import":
        import slow
        return slow.X
    while not (here / "importing").exists():
        time.sleep(0.01)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    context.Process(target=child, args=(queue,), daemon=True).start()
    return queue.get()
"""
SLOW = """
import time
from pathlib import Path

here = Path(__file__).parent
(here / "importing").touch()
while not (here / "forking").exists():
    time.sleep(0.01)
time.sleep(0.1)  # as long as a fork that does not wait takes
X = 1.0
"""


@pytest.mark.skipif(sys.platform != "linux", reason="programs fork on Linux alone")
def test_forked_child_does_not_wait_for_what_another_attempt_imports(store: Store, folder: Path) -> None:
    (folder / "forks.py").write_text(FORKS)
    (folder / "slow.py").write_text(SLOW)
    ids = enqueue(store, [{"how": "import"}, {"how": "fork"}], timeout_s=30.0, max_attempts=1)
    with running(store, Job(target="forks:run"), folder):
        attempts = results(store, ids)
    assert [[a.status for a in each] for each in attempts] == [["succeeded"]] * 2


NEVER_ENDS = """
import os, sys, threading
from pathlib import Path
from lightning_trainer.runner.worker import forks

forks._WAIT_S = 0.0
forks.keep_imports_whole()
package = Path(sys.argv[1], "package")
package.mkdir()
(package / "part.py").touch()
(package / "__init__.py").write_text(
    "import threading, package.part; event = getattr(threading, 'begun', None); event and event(); X = 1"
)
sys.path.insert(0, sys.argv[1])
inside, goes_on = threading.Event(), threading.Event()
threading.begun = lambda: (inside.set(), goes_on.wait())
importing = threading.Thread(target=lambda: __import__("package"))
importing.start()
inside.wait()
pid = os.fork()
if not pid:
    threading.begun = None
    import package.part
    os._exit(0 if package.X == 1 and package.part else 1)
_, status = os.waitpid(pid, 0)
goes_on.set()
importing.join()
import package
assert package.X == 1
sys.exit(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="programs fork on Linux alone")
def test_forked_child_imports_anew_what_another_thread_never_ends_to_import(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", NEVER_ENDS, str(tmp_path)], check=True, timeout=60)


def has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize(("how", "named"), [("exit", "exit status 3"), ("segfault", "SIGSEGV")])
def test_agent_that_ends_its_process_fails_with_the_cause_named(
    store: Store, folder: Path, how: str, named: str
) -> None:
    [[attempt]] = run(store, folder, "behave", {"how": how})
    assert attempt.status == "failed"
    assert named in (attempt.error or "")


def test_crash_costs_nobody_else(store: Store, folder: Path) -> None:
    tasks = [{"how": "brief", "s": 0.5} for _ in range(5)]
    *others, culprit = run(store, folder, "behave", *tasks, {"how": "exit"}, max_attempts=1)
    assert [[a.status for a in each] for each in others] == [["disturbed", "succeeded"]] * 5
    assert [a.status for a in culprit] == ["disturbed", "failed"]


def test_stopped_runner_gives_its_attempts_back_and_leaves_no_process(store: Store, folder: Path) -> None:
    ids = enqueue(store, [{"how": "sleep"}], max_attempts=3)
    with running(store, Job(target="agents:behave"), folder) as runner:
        until(lambda: store.rollouts(rollout_ids=ids)[0].status == "running")
        pid = int(runner.describe().split()[1])
    assert store.rollouts(rollout_ids=ids)[0].status == "queued"
    assert store.attempts(rollout_ids=ids)[0].status == "released"
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_drained_runner_lets_attempts_end(store: Store, folder: Path) -> None:
    ids = enqueue(store, [{"how": "brief"}])
    with running(store, Job(target="agents:behave"), folder) as runner:
        until(lambda: store.rollouts(rollout_ids=ids)[0].status == "running")
        runner.stop(drain_s=20.0)
    assert store.attempts(rollout_ids=ids)[0].status == "succeeded"


@pytest.mark.parametrize("timeout_s", [300.0, None])
@pytest.mark.parametrize("how", ["sleep", "block"])
def test_cancelled_rollout_makes_room(store: Store, folder: Path, how: str, timeout_s: float | None) -> None:
    ids = enqueue(store, [{"how": how}], timeout_s=timeout_s)
    with running(store, Job(target="agents:behave"), folder, concurrency=1, lease_s=1.0):
        until(lambda: store.rollouts(rollout_ids=ids)[0].status == "running")
        store.cancel(ids)
        after = enqueue(store, [{"how": ""}])
        assert results(store, after)[0][0].status == "succeeded"
    assert store.attempts(rollout_ids=ids)[0].status == "cancelled"


def test_worker_whose_message_can_not_be_taken_is_replaced(
    store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take, first = Fleet._take, iter(["the first message"])

    def take_later(fleet: Fleet, *message: Any) -> None:
        if next(first, None):
            raise TypeError("what is this?")
        take(fleet, *message)

    monkeypatch.setattr(Fleet, "_take", take_later)
    attempts = run(store, folder, "behave", {"how": ""})
    assert [attempt.status for attempt in attempts[0]] == ["released", "succeeded"]


def test_attempts_outlive_their_first_lease(store: Store, folder: Path) -> None:
    ids = enqueue(store, [{"how": "brief", "s": 2.6}])
    with running(store, Job(target="agents:behave"), folder, lease_s=2.0):  # a busy machine renews late
        assert [a.status for a in results(store, ids)[0]] == ["succeeded"]


class Away:
    """A store that has gone when an attempt ends, until it is back."""

    def __init__(self, store: Store, error: Exception) -> None:
        self.store, self.error, self.back, self.told = store, error, False, 0
        self.wait: Callable[[], object] = lambda: None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def claim(self, *given: Any, **options: Any) -> list[AttemptRecord]:
        if self.told and not self.back:
            raise self.error
        return self.store.claim(*given, **options)

    def heartbeat(self, *given: Any, **options: Any) -> list[str]:
        if not self.back:
            self.wait()
            raise self.error
        return self.store.heartbeat(*given, **options)

    def finish(self, *given: Any, **options: Any) -> Any:
        if not self.back:
            self.told += 1
            raise self.error
        return self.store.finish(*given, **options)


@pytest.mark.parametrize("beating", [False, True], ids=["heartbeats fail", "a heartbeat still tries"])
@pytest.mark.parametrize("error", [StoreError("does it run?"), UnauthorizedError("answered 401")])
def test_result_waits_for_a_server_that_is_away_for_longer_than_a_lease(
    store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, beating: bool
) -> None:
    monkeypatch.setattr(runners, "RETRY_S", (0.4,))
    away = Away(store, error)
    ids = enqueue(store, [{"how": ""}], max_attempts=1)
    if beating:
        away.wait = lambda: until(lambda: away.told > 4)
    with running(away, Job(target="agents:behave"), folder, lease_s=1.0):  # type: ignore[arg-type]
        until(lambda: away.told > 4)  # the lease's clock stands still meanwhile: nobody uses the store
        with closing(open_store(str(folder / "store.db"))) as again:
            away.store, away.back = again, True
            assert [a.status for a in results(again, ids)[0]] == ["succeeded"]


def test_runner_that_is_stopped_does_not_wait_for_a_server_for_ever(
    store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runners, "RETRY_S", (0.1,))
    away = Away(store, StoreError("does it run?"))
    enqueue(store, [{"how": ""}])
    with running(away, Job(target="agents:behave"), folder, lease_s=1.0) as runner:  # type: ignore[arg-type]
        until(lambda: away.told > 0)
    assert not runner.alive


def test_agent_never_sees_the_runners_key(store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_KEY", "the runner's own")
    run(store, folder, "environment", {})
    assert rewards(store) == [("r0", "", 0.0, "run")]


def test_wrong_target_is_told_at_the_start(store: Store, folder: Path) -> None:
    with pytest.raises(ConfigError, match="has no 'nothing'"), running(store, Job(target="agents:nothing"), folder):
        pass


def test_process_that_dies_while_it_imports_is_told_at_the_start(store: Store, folder: Path) -> None:
    (folder / "dies.py").write_text("import os\nos._exit(4)\n")
    with (
        pytest.raises(ConfigError, match="exit status 4 while it imported"),
        running(store, Job(target="dies:run"), folder),
    ):
        pass


SPANS = """
import lightning_openai
from lightning_spans import agent

lightning_openai.attach()

async def run(task):
    with agent("writer"):
        return 1.0
"""


async def test_spans_of_an_attempt_are_delivered_before_its_end_is_told(folder: Path) -> None:
    pytest.importorskip("openai")
    (folder / "spans_agent.py").write_text(SPANS)
    with ScriptedServer() as server:
        worker = await WorkerProcess.start(Job(target="spans_agent:run"), 4, folder / "log")
        try:
            context = Attempt("r", "r.1", endpoint=server.base, key="k")
            worker.send({"type": "run", "id": 1, "task": {}, "context": attempt_to_json(context)})
            told = [await worker.receive(), await worker.receive()]
            assert [message["type"] for message in told if message] == ["flushing", "ended"]
            early, message = told
            assert early is not None
            assert message is not None
            assert early["status"] == message["status"] == "succeeded"
            assert early["rewards"] == message["rewards"]
            assert message["flushed"]
            assert message["attached"] == ["openai"]
            assert [request.headers["authorization"] for request in server.traces] == ["Bearer k"]
        finally:
            await worker.stop()


COMMAND = """
import json, os, sys, time
task = json.load(sys.stdin)
assert json.loads(os.environ["LIGHTNING_TASK"]) == task
print("working")
if task.get("fail"):
    print("it went wrong", file=sys.stderr)
    sys.exit(5)
if task.get("sleep"):
    open(task["sleep"], "w").write(str(os.getpid()))
    time.sleep(60)
print(task.get("last", json.dumps({"reward": {"writer": float(os.environ["LIGHTNING_ATTEMPT_ID"] != "")}})))
"""


@pytest.fixture
def command(folder: Path) -> Job:
    (folder / "agent_command.py").write_text(COMMAND)
    return Job(command=f"{sys.executable} agent_command.py")


def test_command_gets_its_task_and_its_last_line_is_the_reward(store: Store, folder: Path, command: Job) -> None:
    ids = enqueue(store, [{"q": "Grüße"}, {"last": '{"reward": 0.5}'}, {"last": "3"}, {"fail": True}], max_attempts=1)
    with running(store, command, folder):
        first, second, third, fourth = (each[0] for each in results(store, ids))
    assert (first.status, second.status, third.status, fourth.status) == ("succeeded", "succeeded", "failed", "failed")
    assert rewards(store) == [("r0", "writer", 1.0, "run"), ("r1", "", 0.5, "run")]
    assert "RewardError: the command printed 'working\\n3' at its end, which is not accepted" in (third.error or "")
    assert "exit status 5" in (fourth.error or "")
    assert (fourth.error or "").splitlines() == ["the command ended with exit status 5:", "it went wrong"]


def test_command_over_its_time_is_ended(store: Store, folder: Path, command: Job) -> None:
    ids = enqueue(store, [{"sleep": str(folder / "pid")}], max_attempts=1, timeout_s=1.0)
    with running(store, command, folder, grace_s=5.0):
        assert results(store, ids)[0][0].status == "timeout"
        pid = int((folder / "pid").read_text())
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
