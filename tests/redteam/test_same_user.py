"""A thief that runs as the same user as the runner: what it can open of the runner's and of other attempts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
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
    pids = [os.getppid(), int((folder / "victim").read_text()), int((folder / "child").read_text())]
    told(folder / "looked", repr([openable(pid) for pid in pids]))
    return 1.0
"""
WITHOUT_TRACING = """
import ctypes, os, sys
for right in (19, 21, 38):  # CAP_SYS_PTRACE, CAP_SYS_ADMIN, CAP_PERFMON: root of most containers is without them
    ctypes.CDLL(None).prctl(24, right, 0, 0, 0)  # PR_CAPBSET_DROP
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


def test_a_thief_opens_nothing_of_its_runner_nor_of_another_attempt(server, tmp_path: Path) -> None:
    (tmp_path / "agents.py").write_text(AGENTS)
    (tmp_path / "runner.key").write_text(server.keys.issue("runner", holder="r"))
    command = [sys.executable, "-c", WITHOUT_TRACING, "-m", "lightning_trainer.cli", "runner", "agents:run"]
    command += ["--server", server.url, "--key-file", str(tmp_path / "runner.key"), "--workers", "2", "--isolate"]
    rollouts = [
        Rollout(rollout_id=f"same user {who}", group_id="g", task={"who": who, "folder": str(tmp_path)})
        for who in ("victim", "thief")
    ]
    with subprocess.Popen(command, cwd=tmp_path, env={**os.environ}, stdout=subprocess.PIPE, text=True) as runner:
        killer = threading.Timer(120, runner.kill)
        killer.start()
        try:
            assert json.loads(runner.stdout.readline())["server"] == server.url
            server.store.enqueue(rollouts)
            ids = [rollout.rollout_id for rollout in rollouts]
            while {each.status for each in server.store.rollouts(rollout_ids=ids)} & {"queued", "running"}:
                assert runner.poll() is None
        finally:
            killer.cancel()
            runner.terminate()
    assert {each.status for each in server.store.rollouts(rollout_ids=ids)} == {"succeeded"}
    assert (tmp_path / "looked").read_text() == repr([[], [], []])
    assert _gone(int((tmp_path / "child").read_text()))


def _gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
