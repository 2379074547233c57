"""The processes of a run, and how they are killed and started again."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import httpx

from lightning_trainer.gateway.auth.keys import Keys

HERE = Path(__file__).parent
PARTS = ("server", "runner", "agent", "trainer")
# The trainer when it is done; the runner, with a word, when its server or a worker is killed while it starts.
MAY_END = {"trainer": 0, "runner": 2}
MOST_RESTARTS = 60  # of one part that ended by itself, between two kills


class Run:
    """A server, a runner with two workers, and a trainer, over one folder.

    Args:
        folder: of this run.
        steps: that the trainer takes.
        store: of the server; SQLite in the folder by default.
    """

    def __init__(self, folder: Path, steps: int, store: str | None = None) -> None:
        folder.mkdir(parents=True)
        self.folder, self._steps = folder, steps
        self.store = store or str(folder / "store.db")
        self._port = _free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self._keys = Keys.from_file(folder / "secret")
        self.admin = self._keys.issue("admin")
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self.starts = dict.fromkeys(PARTS, 0)
        self._restarts = dict.fromkeys(PARTS, 0)
        self.failures: list[str] = []

    def start(self, part: str) -> None:
        """Start a part, its output going to a log."""
        commands = {
            "server": [str(HERE / "serve.py"), self.store, str(self.folder / "secret"), str(self._port)],
            "runner": [
                "-m", "lightning_trainer.cli", "runner", "chaos_agent:run", "--server", self.url, "--workers", "2",
                "--concurrency", "8", "--lease-s", "3", "--logs", str(self.folder / "logs"), "--pass-env", "CHAOS_*",
            ],
            "trainer": [str(HERE / "train.py"), str(self.folder), self.url, str(self._steps)],
        }  # fmt: skip
        env = {
            **os.environ,
            "LIGHTNING_KEY": self.admin if part == "trainer" else self._keys.issue("runner"),
            "CHAOS_ACKS": str(self.folder / "acks"),
            "LIGHTNING_SPOOL": str(self.folder / "spool"),
        }
        with (self.folder / f"{part}.log").open("ab") as log:
            self._running[part] = subprocess.Popen(
                [sys.executable, *commands[part]], env=env, cwd=HERE, stdout=log, stderr=log, start_new_session=True
            )
        self.starts[part] += 1

    def kill(self, part: str) -> bool:
        """Kill a part with signal 9; an agent is one of the runner's workers. False where there was none to kill."""
        self._restarts = dict.fromkeys(PARTS, 0)
        if part == "agent":
            workers = children(self._running["runner"].pid)
            if not workers:
                return False
            victim = workers[time.monotonic_ns() % len(workers)]
            try:
                os.killpg(victim, signal.SIGKILL)
            except ProcessLookupError:
                return False
            return True
        process = self._running[part]
        if process.poll() is not None:
            if process.returncode != MAY_END.get(part):
                self.failures.append(f"the {part} ended by itself with {process.returncode}")
            return False
        process.kill()
        process.wait()
        return True

    def pause(self, part: str, seconds: float) -> bool:
        """Stop a part with SIGSTOP, then let it go on; False where there was none."""
        found = children(self._running["runner"].pid) if part == "agent" else [self._running[part].pid]
        try:
            for number in found:
                os.kill(number, signal.SIGSTOP)
            time.sleep(seconds)
            for number in found:
                os.kill(number, signal.SIGCONT)
        except ProcessLookupError:
            return False
        return bool(found)

    def look(self) -> None:
        """Start again what has ended by itself: a runner gives up when its server is away while it starts.

        Raises:
            RuntimeError: a part has ended by itself too often, so that the run would never end.
        """
        for part, process in list(self._running.items()):
            if process.poll() is not None and not (part == "trainer" and process.returncode == 0):
                self._restarts[part] += 1
                if self._restarts[part] > MOST_RESTARTS:
                    log = (self.folder / f"{part}.log").read_text(errors="replace")
                    raise RuntimeError(f"the {part} ended by itself {MOST_RESTARTS} times. Its log ends: {log[-2000:]}")
                self.start(part)

    def done(self) -> bool:
        """Whether the trainer has taken all its steps."""
        trainer = self._running.get("trainer")
        return trainer is not None and trainer.poll() == 0

    def ready(self, limit_s: float = 60.0) -> None:
        """Wait until the server answers."""
        until = time.monotonic() + limit_s
        while True:
            try:
                httpx.get(f"{self.url}/healthz", timeout=5.0, trust_env=False)
                return
            except httpx.HTTPError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)

    def stop(self, *parts: str) -> None:
        """End parts for good."""
        for part in parts:
            process = self._running.pop(part, None)
            if process is not None:
                workers = children(process.pid)
                process.kill()
                process.wait()
                for worker in workers:
                    with suppress(ProcessLookupError):
                        os.killpg(worker, signal.SIGKILL)


def children(pid: int) -> list[int]:
    """Return the worker processes of a runner: each is the child of one of its threads."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [int(word) for word in task.read_text().split()]
        except OSError:
            continue  # that thread has ended
    return sorted(found)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])
