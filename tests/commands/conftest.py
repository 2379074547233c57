"""Agents that are commands, from npm and PyPI, over a gateway with a scripted engine. The session `commands` has them.

Each works on a small repository as the runner starts it: it gets a base URL and a key, and nothing else of ours.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest

from lightning_spans.schema.attempts import Attempt
from lightning_trainer.gateway.settings import Routing
from lightning_trainer.naming import parse_rules
from lightning_trainer.runner.target import Job
from lightning_trainer.runner.worker.command_agent import DIFF
from lightning_trainer.work import Work
from support.fakes import FakeEngine, served
from support.runners import run_agent

BIN = os.environ.get("COMMANDS_BIN", "")  # folders with the programs, as in PATH; the session says which
TEST = "git diff --exit-code HEAD -- test_calc.py && python3 -B test_calc.py"
TASK = {"prompt": "Fix add in calc.py"}


@pytest.fixture
def program(request):
    """The program of a test's module is there; it is skipped else."""
    name = request.module.PROGRAM
    if shutil.which(name, path=BIN) is None:
        pytest.skip(f"no {name}: see the session `commands`")
    return name


@pytest.fixture
def project(tmp_path):
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "calc.py").write_text("def add(a, b):\n    return a - b\n")
    (folder / "test_calc.py").write_text("from calc import add\n\nassert add(2, 3) == 5\n")
    for words in (
        ["init", "-q"],
        ["add", "."],
        ["-c", "user.name=n", "-c", "user.email=e@x", "commit", "-qm", "first"],
    ):
        subprocess.run(["git", *words], cwd=folder, check=True)
    return folder


class Commands:
    """Runs commands on the project, and says what is on record of them."""

    def __init__(self, server, project, name):
        self.server, self._project, self.name = server, project, name

    def rules(self, *texts):
        """Name agents by these rules."""
        routing = Routing(agents=("*",), model="policy", name_by=parse_rules(texts))
        self.server.app.state.routing = routing

    async def run(self, command, script, **task):
        """Run a command; return its reward. The engine answers as `script` says to a prompt."""
        self.server.engine.play(script)
        key = self.server.key(self.name, agent="agent")
        rollout = f"rollout of {self.name}"
        attempt = Attempt(
            rollout_id=rollout, attempt_id=self.name, endpoint=self.server.url, key=key, agents=("*",), model="policy"
        )
        work = Work(workdir=str(self._project), reward_command=f"sh -c '{TEST}'")
        return await run_agent(Job(command=command, work=work), {**TASK, **task}, attempt)

    @property
    def calls(self):
        return self.server.calls(self.name)

    @property
    def diff(self):
        """What the newest run changed."""
        spans = self.server.store.spans(attempt_ids=[self.name])
        return [span for span in spans if span.operation == "workdir"][-1].attributes[DIFF]

    def answered(self, agent="agent"):
        """The calls of an agent that the engine answered: whole, each going on with the tokens of the one before."""
        found = [one for one in self.calls if one.agent == agent and one.choices]
        for one in found:
            assert one.error is None
            assert all(len(choice.token_ids) == len(choice.logprobs) > 0 for choice in one.choices)
        for one, two in pairwise(found):
            before = one.prompt_token_ids + one.choices[0].token_ids
            assert two.prompt_token_ids[: len(before)] == before
        return found


@pytest.fixture
def commands(request, tmp_path, project, program, monkeypatch):
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("PATH", f"{BIN}{os.pathsep}{os.environ['PATH']}")
    for name in list(os.environ):
        if name.startswith(("ANTHROPIC_", "OPENAI_", "CODEX_", "CLAUDE", "XDG_", "LIGHTNING_")):
            monkeypatch.delenv(name)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with served(Path(tmp_path), FakeEngine(version=3, max_model_len=400_000)) as server:
        yield Commands(server, project, request.node.name)
