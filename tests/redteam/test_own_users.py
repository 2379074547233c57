"""A user of its own for each attempt: what the system then keeps apart, and what is refused where it can't."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from lightning_spans.errors import ConfigError
from lightning_spans.schema.attempts import Rollout
from lightning_trainer.runner import own_users
from lightning_trainer.runner.own_users import OwnUsers, check_key_file, parse_users

FIRST = 761_300
USERS = range(FIRST, FIRST + 4)


def _for_every_user() -> bool:
    """Whether another user could run this Python at all."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return False
    try:
        return (
            subprocess.run([sys.executable, "-c", "import lightning_trainer"], user=FIRST, check=False).returncode == 0
        )
    except OSError:
        return False


needs_root = pytest.mark.skipif(not _for_every_user(), reason="needs root, and a Python that every user may run")

# The victim stays until the thief has looked; then both leave a process behind that tries to outlive them.
AGENTS = """
import os, subprocess, time
from pathlib import Path


def wait_for(path):
    while not path.exists():
        time.sleep(0.02)


def told(path, text):
    half = path.with_suffix(".half")
    half.write_text(text)
    half.chmod(0o644)
    half.rename(path)


def refused(look):
    try:
        look()
    except OSError as error:
        return type(error).__name__
    return "it worked"


def run(task):
    assert "NoNewPrivs:\\t1" in Path("/proc/self/status").read_text()
    folder = Path(task["folder"])
    Path.home().joinpath("diary").write_text("mine")
    Path(os.environ["TMPDIR"], "notes").write_text("mine too")
    if os.fork() == 0:
        os.setsid()
        time.sleep(600)
    if task["who"] == "victim":
        child = subprocess.Popen(["sleep", "600"], start_new_session=True, env={})
        told(folder / "victim", f"{os.getpid()} {child.pid} {Path.home()} {os.getuid()} {os.getgid()} {os.getgroups()}")
        wait_for(folder / "looked")
        return 1.0
    wait_for(folder / "victim")
    worker, child, home, uid, *_ = (folder / "victim").read_text().split()
    looks = {
        "memory": lambda: open(f"/proc/{worker}/mem", "rb"),
        "memory of a command": lambda: open(f"/proc/{child}/mem", "rb"),
        "environment of a command": lambda: open(f"/proc/{child}/environ", "rb").read(),
        "environment of the runner": lambda: open(f"/proc/{os.getppid()}/environ", "rb").read(),
        "home": lambda: os.listdir(home),
        "diary": lambda: open(f"{home}/diary"),
        "key file": lambda: open(task["key_file"]),
        "signal": lambda: os.kill(int(worker), 9),
        "another user": lambda: os.setuid(int(uid)),
        "root": lambda: os.setuid(0),
    }
    told(folder / "looked", repr({name: refused(look) for name, look in looks.items()}))
    return 1.0
"""


@needs_root
def test_attempts_of_users_of_their_own_reach_nothing_of_each_other(server) -> None:
    with TemporaryDirectory() as made:
        folder = Path(made)
        folder.chmod(0o777)
        (folder / "agents.py").write_text(AGENTS)
        (folder / "agents.py").chmod(0o644)
        key_file = folder / "runner.key"
        key_file.write_text(server.keys.issue("runner", holder="r"))
        key_file.chmod(0o600)
        command = [sys.executable, "-m", "lightning_trainer.cli", "runner", "agents:run", "--server", server.url]
        command += ["--key-file", str(key_file), "--workers", "2", "--isolate-users", f"{FIRST}-{FIRST + 3}"]
        rollouts = [
            Rollout(
                rollout_id=f"own user {who}",
                group_id="g",
                task={"who": who, "folder": made, "key_file": str(key_file)},
            )
            for who in ("victim", "thief")
        ]
        ids = [rollout.rollout_id for rollout in rollouts]
        with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as runner:
            killer = threading.Timer(120, runner.kill)
            killer.start()
            try:
                assert json.loads(runner.stdout.readline())["server"] == server.url
                server.store.enqueue(rollouts)
                while {each.status for each in server.store.rollouts(rollout_ids=ids)} & {"queued", "running"}:
                    assert runner.poll() is None
            finally:
                killer.cancel()
                runner.terminate()
        errors = [each.error for each in server.store.attempts(rollout_ids=ids)]
        assert {each.status for each in server.store.rollouts(rollout_ids=ids)} == {"succeeded"}, errors
        found = eval((folder / "looked").read_text())
        assert {name: how for name, how in found.items() if how != "PermissionError"} == {}
        _, _, home, uid, gid, groups = (folder / "victim").read_text().split(maxsplit=5)
        assert int(uid) == int(gid)
        assert int(uid) in USERS
        assert groups == "[]"
        assert not Path(home).exists()
    assert own_users._processes_of(USERS) == []


@needs_root
def test_ids_that_are_somebodys_or_too_few_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"0 is root|root"):
        OwnUsers(range(8), 2)
    with pytest.raises(ConfigError, match="need 4 user ids"):
        OwnUsers(range(FIRST, FIRST + 3), 2)
    with subprocess.Popen(["sleep", "600"], user=FIRST) as busy:
        try:
            with pytest.raises(ConfigError, match=f"process {busy.pid} runs as user {FIRST}"):
                OwnUsers(USERS, 2)
        finally:
            busy.kill()


def test_what_can_not_be_had_is_refused_and_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(own_users.sys, "platform", "darwin")
    with pytest.raises(ConfigError, match=r"needs Linux.*darwin.*containers"):
        OwnUsers(USERS, 1)
    monkeypatch.setattr(own_users.sys, "platform", "linux")
    monkeypatch.setattr(own_users.os, "geteuid", lambda: 1000, raising=False)
    with pytest.raises(ConfigError, match=r"root started.*container"):
        OwnUsers(USERS, 1)
    for text in ("", "5", "0-9", "9-5", "a-b", "1-4294967295", "1-2-3"):
        with pytest.raises(ConfigError, match="FIRST-LAST"):
            parse_users(text)
    assert parse_users("200000-200003") == range(200_000, 200_004)
    key = tmp_path / "key"
    key.write_text("k")
    key.chmod(0o600)
    check_key_file(key)
    key.chmod(0o644)
    with pytest.raises(ConfigError, match="mode to 600"):
        check_key_file(key)


def test_a_user_whose_processes_do_not_end_is_not_used_again(monkeypatch, tmp_path, caplog) -> None:
    for name, fake in {"_check": None, "_home": tmp_path, "_clear": None, "_end_all": False}.items():
        monkeypatch.setattr(own_users, name, lambda *_, fake=fake: fake)

    async def use_up() -> None:
        users = OwnUsers(range(FIRST, FIRST + 2), 1)
        taken = [await users.take(), await users.take()]
        assert {user.number for user in taken} == {FIRST, FIRST + 1}
        more = asyncio.ensure_future(users.take())
        for user in taken:
            await users.give_back(user)
            await users.give_back(user)
        with pytest.raises(ConfigError, match="none is left"):
            await more
        with pytest.raises(ConfigError, match="none is left"):
            await users.take()

    asyncio.run(use_up())
    assert caplog.text.count("it is not used again") == 2


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="only root gives users")
def test_a_python_that_others_can_not_run_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "python").symlink_to(sys.executable)
    tmp_path.chmod(0o700)
    monkeypatch.setattr(own_users.sys, "executable", str(tmp_path / "python"))
    with pytest.raises(ConfigError, match=rf"user {FIRST} can't run a worker.*open to every user"):
        OwnUsers(USERS, 1)
