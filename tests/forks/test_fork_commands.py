"""A command in a replay: its model calls are given, its own tools can not be, so its user is asked first."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from lightning_spans.errors import ConfigError
from lightning_spans.schema.attempts import Rollout
from lightning_spans.store import open_store
from lightning_trainer.cli import cli
from lightning_trainer.kits.replay import ForkConfig, ReplayConfig
from lightning_trainer.kits.replay.running import Program, from_run
from lightning_trainer.report.progress import Silent
from lightning_trainer.runner.runner import Runner
from lightning_trainer.runner.target import Job
from lightning_trainer.session.answers import AnswerSource
from lightning_trainer.session.sampling import SamplingOptions
from lightning_trainer.session.session import serve
from lightning_trainer.work import Work
from support.fakes import FakeEngine

# It knows nothing of us: two model calls over HTTP, and a tool of its own between them.
PROGRAM = """
import json, os, sys, urllib.request

def ask(text):
    body = {"model": "own", "messages": [{"role": "user", "content": text}]}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode())
    request.add_header("content-type", "application/json")
    request.add_header("authorization", "Bearer " + os.environ["OPENAI_API_KEY"])
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]

draft = ask("write " + json.load(sys.stdin)["q"])
with open("notes.txt", "a") as file:
    file.write(draft + chr(10))
print(json.dumps({"reward": len(ask("judge " + draft)) / 99}))
"""


def record(store: str, job: Job, folder: Path, *rules: str) -> None:
    """Run the command once."""
    kept = open_store(store)
    runner = Runner(job, workers=1, concurrency=1, logs=folder)
    runner.start()
    try:
        engine = FakeEngine(lambda prompt: f"drawn {len(prompt)}")
        answers = AnswerSource(model=engine.model, engines=[engine])
        with serve(kept, runner, answers, SamplingOptions(seed=1, name_by=rules)) as session:
            made = Rollout(rollout_id="r", group_id="r", task={"q": "a poem"}, timeout_s=600.0)
            (outcome,) = session.run([made], Silent(), "recording")
            assert outcome.error is None
    finally:
        runner.stop()
        kept.close()


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the command once; return how it is told to the command line."""
    (tmp_path / "agent.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    for name in ("OPENAI_BASE_URL", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    program = f"{sys.executable} agent.py"
    record(str(tmp_path / "store.db"), Job(command=program), tmp_path)
    return ["--command", program, "--store", str(tmp_path / "store.db"), "--rollout", "r", "--workers", "1", "--json"]


def notes() -> int:
    return Path("notes.txt").read_text().count("\n")


def run(*words: str, status: int = 0) -> Any:
    found = CliRunner().invoke(cli, list(words))
    assert found.exit_code == status, found.output
    return json.loads(found.stdout.rstrip("\n").rpartition("\n")[2])


def test_a_command_that_records_nothing_is_not_run_again_unless_its_tools_may(words: list[str]) -> None:
    for name, more in (("fork", ["--dry-run"]), ("fork", ["--call", "1"]), ("replay", [])):
        found = CliRunner().invoke(cli, [name, *words, *more])
        assert found.exit_code == 2
        assert "its own tools, if any, would run again" in found.output
    assert notes() == 1


def test_a_command_replays_and_forks_where_its_tools_may_run(words: list[str]) -> None:
    told = run("fork", *words, "--tools", "run", "--dry-run")
    assert (told["replays"], told["ended"]) == (True, [])
    assert notes() == 2  # as the option says
    told = run("fork", *words, "--tools", "run", "--call", "1", "--say", "quite good")
    assert told["ended"] == []
    assert told["continuations"][0]["reward"] == pytest.approx(len("quite good") / 99)
    (replayed,) = run("replay", *words, "--run-tools", "*")["replays"]
    assert (replayed["succeeds"], replayed["parted"], replayed["reason"]) == (True, None, None)
    Path("agent.py").write_text(PROGRAM.replace('"judge "', '"judge strictly "'))
    told = run("fork", *words, "--tools", "run", "--dry-run", status=2)
    assert "message 1 (user) differs" in told["ended"][0]["reason"]


def test_a_command_whose_agents_rules_name_replays_and_forks(words: list[str], tmp_path: Path) -> None:
    rules = ["judge=model:own"]
    run_folder = tmp_path / "run"
    run_folder.mkdir()
    store = str(run_folder / "lightning.db")
    record(store, Job(command=words[1]), tmp_path, *rules)
    same = [*words[:2], "--store", store, *words[4:]]
    told = run("fork", *same, "--tools", "run", "--dry-run", status=2)
    assert "the record has no call of `agent`; it has calls of judge" in told["ended"][0]["reason"]
    named = [*same, "--name-by", *rules]
    assert run("fork", *named, "--tools", "run", "--dry-run")["replays"] is True
    told = run("fork", *named, "--tools", "run", "--call", "1", "--say", "quite good")
    assert told["continuations"][0]["reward"] == pytest.approx(len("quite good") / 99)
    (run_folder / "config.json").write_text(json.dumps({"command": words[1], "name_by": rules}))
    for more in (same, named):
        (replayed,) = run("replay", *more, "--run-tools", "*")["replays"]
        assert (replayed["succeeds"], replayed["parted"]) == (True, None)


def test_the_command_of_a_run_works_again_in_a_folder_of_its_own(words: list[str], tmp_path: Path) -> None:
    project, run_folder = tmp_path / "project", tmp_path / "run"
    project.mkdir()
    run_folder.mkdir()
    (project / "notes.txt").write_text("first\n")
    count = f"""{sys.executable} -c "print('{{\\"reward\\": %d}}' % sum(1 for line in open('notes.txt')))" """
    work = Work(workdir=str(project), reward_command=count, reward_range="0,9")
    program = f"{sys.executable} {tmp_path / 'agent.py'}"
    store = str(run_folder / "lightning.db")
    record(store, Job(command=program, work=work), tmp_path, "clerk=model:own")
    options = {"command": program, **asdict(work), "name_by": ["clerk=model:own"]}
    (run_folder / "config.json").write_text(json.dumps(options))
    same = ["--store", store, "--rollout", "r", "--workers", "1", "--json"]
    told = run("fork", *same, "--tools", "run", "--dry-run")
    assert (told["recorded"], told["replays"], told["ended"]) == (2.0, True, [])
    for more in ([], ["--command", program]):  # also where the command is named anew
        (replayed,) = run("replay", *same, "--run-tools", "*", *more)["replays"]
        assert (replayed["reward"], replayed["succeeds"], replayed["parted"]) == (2.0, True, None)
    assert (project / "notes.txt").read_text() == "first\n"
    assert notes() == 1
    filled = from_run(Program(), store)
    assert (filled.work.workdir, filled.name_by) == (str(project), ("clerk=model:own",))
    assert from_run(Program(reward="mine:score"), store).work == Work(workdir=str(project))


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: ForkConfig(store="lightning.db", call=0, times=0), "times"),
        (lambda: ForkConfig(store="lightning.db", tools="retry"), "tools"),
        (lambda: ReplayConfig(store="lightning.db", success="high"), "success"),
        (lambda: ReplayConfig(store="lightning.db", rollout="r"), "rollout"),
    ],
)
def test_a_wrong_option_is_refused_from_python_too(make, name):
    with pytest.raises(ConfigError, match=name):
        make()
