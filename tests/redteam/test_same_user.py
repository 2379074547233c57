"""A thief that runs as the same user as the runner: what it can open of the runner's and of other attempts."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from lightning_spans.schema.attempts import Rollout

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")

# The victim stays until the thief has looked. Both say who they are; the thief says what it could open of whom.
AGENTS = """
import os, signal, time
from pathlib import Path


def wait_for(path):
    while not path.exists():
        time.sleep(0.02)


def told(path, text):
    half = path.with_suffix(".half")
    half.write_text(text)
    half.rename(path)


def openable(pid):
    looks = {
        "mem": lambda: open(f"/proc/{pid}/mem", "r+b").close() or True,
        "environ": lambda: Path(f"/proc/{pid}/environ").read_bytes(),
        "maps": lambda: Path(f"/proc/{pid}/maps").read_bytes(),
        "fd": lambda: os.readlink(f"/proc/{pid}/fd/0"),
    }
    found = []
    for name, look in looks.items():
        try:
            if look():
                found.append(name)
        except OSError:
            pass
    return found


def run(task):
    folder = Path(task["folder"])
    if task["who"] == "victim":
        if os.fork() == 0:  # what an agent forks holds what it held
            os.setsid()  # out of its worker's reach, it hopes
            told(folder / "child", str(os.getpid()))
            signal.pause()
        told(folder / "victim", str(os.getpid()))
        wait_for(folder / "looked")
        return 1.0
    wait_for(folder / "victim")
    wait_for(folder / "child")
    runner = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1]
    pids = [os.getppid(), runner, int((folder / "victim").read_text()), int((folder / "child").read_text())]
    told(folder / "looked", repr([openable(pid) for pid in pids]))
    return 1.0
"""
WITHOUT_TRACING = """
import ctypes, os, sys
for right in (19, 21, 38):  # CAP_SYS_PTRACE, CAP_SYS_ADMIN, CAP_PERFMON: root of most containers is without them
    ctypes.CDLL(None).prctl(24, right, 0, 0, 0)  # PR_CAPBSET_DROP
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


@contextmanager
def running_without_tracing(server, folder: Path) -> Iterator[Callable[..., None]]:
    """Run a runner of two workers that may not trace; gives what runs its agent as somebody, to the end or not."""
    (folder / "runner.key").write_text(server.keys.issue("runner", holder="r"))
    command = [sys.executable, "-c", WITHOUT_TRACING, "-m", "lightning_trainer.cli", "runner", "agents:run"]
    command += ["--server", server.url, "--key-file", str(folder / "runner.key"), "--workers", "2", "--isolate"]

    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as runner:
        killer = threading.Timer(120, runner.kill)
        killer.start()

        def run(who: str, *, wait: bool = True) -> None:
            rollout = Rollout(rollout_id=f"{folder.name} {who}", group_id="g", task={"who": who, "folder": str(folder)})
            server.store.enqueue([rollout])
            while wait and server.store.rollouts(rollout_ids=[rollout.rollout_id])[0].status in {"queued", "running"}:
                assert runner.poll() is None

        try:
            assert json.loads(runner.stdout.readline())["server"] == server.url
            yield run
        finally:
            killer.cancel()
            runner.terminate()


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.02)


def test_a_thief_opens_nothing_of_its_runner_nor_of_another_attempt(server, tmp_path: Path) -> None:
    (tmp_path / "agents.py").write_text(AGENTS)
    with running_without_tracing(server, tmp_path) as run:
        run("victim", wait=False)
        run("thief")
    assert (tmp_path / "looked").read_text() == repr([[], [], [], []])
    assert _gone(int((tmp_path / "child").read_text()))


def _gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


# Opens the memory of each worker in its first moments, before it keeps to itself, and looks at it later.
EARLY = """
import ctypes, os, time
from pathlib import Path


def wait_for(path):
    while not path.exists():
        time.sleep(0.02)


def told(path, text):
    half = path.with_suffix(".half")
    half.write_text(text)
    half.rename(path)


def opened(known):
    while True:
        time.sleep(0.001)
        for pid in [int(name) for name in os.listdir("/proc") if name.isdigit() and name not in known]:
            try:
                if b"lightning_trainer.runner.worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    return open(f"/proc/{pid}/mem", "rb", 0)
            except OSError:
                continue


def read(handle, address):
    try:
        handle.seek(address)
        return handle.read(20)
    except OSError:
        return b""


def run(task):
    folder = Path(task["folder"])
    if task["who"] == "thief":
        known = set(os.listdir("/proc"))
        told(folder / "watching", "")
        handle = opened(known)
        told(folder / "opened", "")
        wait_for(folder / "address")
        told(folder / "found", repr(read(handle, int((folder / "address").read_text()))))
    if task["who"] == "victim":
        secret = ctypes.create_string_buffer(b"the victim's".ljust(16) + b"key.")
        told(folder / "address", str(ctypes.addressof(secret)))
        wait_for(folder / "found")
    return 1.0
"""


def test_memory_that_was_opened_before_a_worker_kept_to_itself_holds_no_attempt(server, tmp_path: Path) -> None:
    (tmp_path / "agents.py").write_text(EARLY)
    with running_without_tracing(server, tmp_path) as run:
        run("thief", wait=False)
        wait_for(tmp_path / "watching")
        number = 0
        while not (tmp_path / "opened").exists():  # each attempt's end begins a worker
            run(f"passer-by {number}")
            number += 1
        run("victim")
    assert "key" not in (tmp_path / "found").read_text()


STARTED = """
import ctypes
from pathlib import Path
from lightning_trainer.runner.runner import Runner
from lightning_trainer.runner.target import Job

runner = Runner(Job(target="agents:run"), workers=1, concurrency=1, logs=Path("logs"))
runner.start()
print(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0))  # PR_GET_DUMPABLE
runner.stop()
"""


def test_whoever_starts_a_runner_from_python_keeps_its_memory_to_itself(tmp_path: Path) -> None:
    """Training's process holds the secret that signs all keys, and agents are its children."""
    (tmp_path / "agents.py").write_text("def run(task):\n    return 1.0\n")
    words = [sys.executable, "-c", STARTED]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0"]
