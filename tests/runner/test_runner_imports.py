"""A runner beside packages that conflict with the trainer's: it needs the core, click, pydantic, rich and psutil."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from lightning_spans.schema.attempts import Rollout
from support.fakes import served
from support.runners import results

# Of what the trainer depends on, all but those four: Python imports this first in every process.
BLOCKER = """
import sys

MISSING = {
    "aiohttp", "fastapi", "filelock", "httptools", "itsdangerous", "jinja2", "jsonschema", "matplotlib", "numpy",
    "platformdirs", "prometheus_client", "referencing", "starlette", "tensorboardX", "uvicorn", "uvloop",
}

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in MISSING:
            raise ModuleNotFoundError(f"{name} is not installed here", name=name)

sys.meta_path.insert(0, Blocker())
"""


def test_a_runner_needs_little_more_than_the_core(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(BLOCKER)
    (tmp_path / "own.py").write_text("def run(task):\n    return 0.5\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    with served(tmp_path) as server:
        (tmp_path / "key").write_text(server.keys.issue("runner"))
        server.store.enqueue([Rollout(rollout_id="r", group_id="g", task={})])
        command = [sys.executable, "-m", "lightning_trainer", "runner", "own:run", "--workers", "1"]
        command += ["--server", server.url, "--key-file", "key"]
        process = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
        try:
            [[attempt]] = results(server.store, ["r"])
        finally:
            process.send_signal(signal.SIGTERM)
            told = process.communicate(timeout=60)[1]
        assert attempt.status == "succeeded", told
        assert [reward.value for reward in server.store.rewards(rollout_ids=["r"])] == [0.5]
        assert process.returncode == 0, told
