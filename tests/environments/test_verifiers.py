"""`--env` with environments of verifiers, of both generations: whichever is installed here is run for real."""

from __future__ import annotations

import importlib.util
import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verifiers")

from click.testing import CliRunner, Result

from lightning_conformance import ScriptedServer
from lightning_conformance.plugins.script import Reply
from lightning_spans.errors import AgentFailedError
from lightning_spans.store import open_store
from lightning_trainer.cli import cli

PROGRAMS = Path(__file__).parent / "programs"
CLASSIC = importlib.util.find_spec("datasets") is not None and importlib.util.find_spec("verifiers.rubrics") is not None
TASKSETS = importlib.util.find_spec("verifiers.v1.taskset") is not None and not CLASSIC
classic = pytest.mark.skipif(not CLASSIC, reason="verifiers from 0.4 on is installed")
tasksets = pytest.mark.skipif(not TASKSETS, reason="verifiers before 0.4 is installed")
NAME = "sums_classic" if CLASSIC else "sums_tasksets"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LIGHTNING_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(PROGRAMS), prepend=":")
    monkeypatch.syspath_prepend(str(PROGRAMS))
    monkeypatch.chdir(tmp_path)
    for name in ("LIGHTNING_KEY", "OPENAI_BASE_URL", "OPENAI_MODEL"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def rl(*args: str) -> Result:
    return CliRunner().invoke(cli, [*args])


def right(body: Any, _seen: int) -> Reply:
    """Add, but wrongly from 3 + 4 on."""
    asked = next(str(m["content"]) for m in body["messages"] if m["role"] == "user" and "=" in str(m["content"]))
    one, other = map(int, re.findall(r"\d+", asked))
    return Reply(text=str(one + other if one < 3 else 0))


def test_an_environment_is_evaluated_by_its_own_loop_and_rubric(folder):
    turns = 2 if CLASSIC else 1
    with ScriptedServer(right) as server:
        args = ["--env", NAME, "--env-tasks", "5", "--endpoint", server.url, "--model", "gpt", "--workers", "1"]
        result = rl("eval", *args, "--json", "--out", "e")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout.splitlines()[-1])
    assert (found["mean"], found["tasks"], found["failed"]) == (pytest.approx(3 / 5), 5, 0)
    assert found["by_agent"]["agent"]["calls"] == 5 * turns
    assert len(server.requests) == 5 * turns
    store = open_store(str(folder / "e/lightning.db"))
    try:
        assert {call.agent for call in store.calls()} == {"agent"}
    finally:
        store.close()


def test_options_reach_the_environment_and_held_out_tasks_are_others(folder):
    from lightning_trainer.environments import open_environment

    option = "num_tasks" if CLASSIC else "taskset.num_tasks"
    opened = open_environment(NAME, {option: 9}, tasks=7, held_out=2)
    rows = [json.loads(line) for line in opened.data.read_text().splitlines()]
    assert opened.val is not None
    held = [json.loads(line) for line in opened.val.read_text().splitlines()]
    assert (len(rows), len(held)) == (7, 2)
    assert not {json.dumps(row["task"]["prompt"]) for row in rows} & {json.dumps(row["task"]["prompt"]) for row in held}
    assert open_environment(NAME, {option: 9}, tasks=7, held_out=2) == opened


def test_what_is_wrong_is_said_before_anything_starts():
    for args, words in (
        (("--env", "nothing_there"), "there is no module 'nothing_there'"),
        (("--env", NAME, "--env-options", "colour=red"), "can't be loaded"),
        (("--env", "other:thing"), "write verifiers:NAME, openenv:URL"),
        (("--env", NAME, "--data", "x.jsonl"), "leave out data"),
        (("--env-tasks", "3"), "env_tasks is an option of env"),
        (("--env", NAME, "--env-tasks", "1", "--env-held-out", "50"), "Hold out fewer"),
    ):
        result = rl("train", *args, "--model", "none")
        assert result.exit_code == 2, result.output
        assert words in re.sub(r"\s+", " ", result.output), args
    assert "--env needs --model or --endpoint" in rl("eval", "--env", NAME).output


def test_an_environment_leaves_ctrl_c_and_sigterm_to_the_run():
    from lightning_trainer.environments import open_environment

    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    open_environment(NAME, {"num_tasks" if CLASSIC else "taskset.num_tasks": 4}, tasks=2)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


@tasksets
def test_an_older_environment_is_told_from_a_missing_one():
    from lightning_trainer.kits.environments.verifiers_classic import tasks

    with pytest.raises(Exception, match=r"pip install 'verifiers<0\.4'"):
        tasks("sums_classic", {}, 1, 0)


def test_the_look_before_training_plays_an_environments_tasks_too(folder):
    with ScriptedServer(right) as server:
        where = ["--endpoint", server.url, "--model", "gpt"]
        result = rl("agents", "--env", NAME, "--tasks", "2", *where, "--json")
    assert result.exit_code == 0, result.output
    [row] = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    assert (row["agent"], row["calls"], row["reward"]) == ("agent", 2 * (2 if CLASSIC else 1), 1.0)
    assert "--env needs --model or --endpoint" in rl("agents", "--env", NAME).output
    assert "leave out data" in rl("agents", "--env", NAME, "--data", "x.jsonl", *where).output
    assert "env_options is an option of env" in rl("agents", "--env-options", "a=1").output


async def test_an_episode_that_fails_is_a_failed_attempt_and_no_reward(monkeypatch):
    from lightning_trainer.environments import open_environment
    from lightning_trainer.kits.environments.from_verifiers import run

    row = json.loads(open_environment(NAME, tasks=1).data.read_text())
    with ScriptedServer(lambda _body, _seen: Reply(status=400, text="the model is out")) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        monkeypatch.setenv("OPENAI_MODEL", "gpt")
        with pytest.raises(AgentFailedError, match="the model is out"):
            await run(row)


@pytest.mark.torch
def test_training_learns_from_an_environments_rollouts(folder, tiny_model):
    args = ["--env", NAME, "--env-tasks", "2", "--env-held-out", "1", "--model", str(tiny_model)]
    sizes = ["--steps", "1", "--batch-size", "2", "--group-size", "2", "--max-tokens", "8", "--workers", "1"]
    result = rl("train", *args, *sizes, "--device", "cpu", "--out", "run")
    assert result.exit_code in (0, 4), result.output  # a random model may earn the same everywhere
    rows = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    assert rows


@pytest.mark.torch
def test_a_run_of_a_file_with_an_environment_goes_on_from_where_it_stopped(folder, tiny_model):
    table = "[env_options]\nnum_tasks" if CLASSIC else "[env_options.taskset]\nnum_tasks"
    sizes = 'batch_size = 2\ngroup_size = 2\nworkers = 1\ndevice = "cpu"\nout = "run"\n'
    # A random model earns nothing of the environment's own.
    score = "def score(task, result):\n    return float(next(numbers))\n"
    (folder / "mine.py").write_text(f"import itertools\nnumbers = itertools.count()\n{score}")
    (folder / "run.toml").write_text(
        f'reward = "mine:score"\n'
        f'env = "{NAME}"\nenv_tasks = 2\nenv_held_out = 1\nmodel = "{tiny_model}"\nsteps = 1\nmax_tokens = 8\n'
        f"{sizes}{table} = 6\n"
    )
    begun = rl("train", "--config", "run.toml")
    assert begun.exit_code == 0, begun.output
    kept = json.loads((folder / "run/config.json").read_text())
    assert (kept["env"], kept["env_tasks"], kept["env_held_out"]) == (NAME, 2, 1)
    Path(kept["data"]).unlink()  # the cache was cleared
    gone_on = rl("train", "--resume", "run", "--steps", "2")
    assert gone_on.exit_code == 0, gone_on.output
    assert "step 2/2" in gone_on.output
    assert Path(kept["data"]).is_file()
