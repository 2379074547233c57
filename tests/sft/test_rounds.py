"""`lightning-rl sft --rounds`: the program samples on the current weights, and the best of each group is learned."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

pytest.importorskip("torch")
pytest.importorskip("openai")
pytestmark = pytest.mark.torch

from lightning_spans.errors import AgentFailedError, ConfigError, NothingToLearnError
from lightning_spans.schema.attempts import Rollout
from lightning_spans.schema.rewards import Reward
from lightning_spans.store import open_store
from lightning_spans.store.traces import traces_of
from lightning_trainer.cli import cli
from lightning_trainer.kits.sft.config import RoundsConfig
from lightning_trainer.kits.sft.rounds.loop import _is_better, round_steps
from lightning_trainer.kits.sft.rounds.rejection import rejection_sampling
from lightning_trainer.report.progress import Silent
from lightning_trainer.rl.rollouts import Outcome
from support.training.programs import put_programs
from support.training.tiny_runs import AGENT

MORE = """

async def flat(task):
    await say("writer", task["q"])
    return 0.0

async def one_sided(task):
    draft = await say("writer", task["q"])
    await say("rewriter", task["q"])
    return {"writer": sum(c.isascii() and c.isalpha() for c in draft) / 5, "rewriter": 0.0}

async def once(task):
    with open("runs", "a+") as runs:
        first = runs.tell() < 12
        runs.write(".")
    if first:
        return await run(task)
    try:
        await say("critic", task["q"])
    except Exception:  # nobody answers it: it is not trained
        return 0.0
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    put_programs(tmp_path, ({"q": q} for q in "abc"), rounds_app=AGENT + MORE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Path:
    """Return a model that ends its answers: every other token does."""
    made = tmp_path / "model"
    shutil.copytree(tiny_model, made)
    settings = json.loads((made / "generation_config.json").read_text())
    (made / "generation_config.json").write_text(json.dumps({**settings, "eos_token_id": [2, *range(3, 259, 2)]}))
    return made


@pytest.mark.parametrize(("rows", "steps"), [(1, 1), (14, 7), (30, 10), (400, 50)])
def test_a_round_of_few_rollouts_takes_enough_steps_to_learn(rows: int, steps: int) -> None:
    options: dict[str, Any] = {"target": "a:b", "rounds": 1, "tasks": Path("t.jsonl"), "model": "m"}
    assert round_steps(RoundsConfig(**options), rows) == steps
    assert round_steps(RoundsConfig(**options, epochs=1.0), rows) == -(-rows // 16)
    assert round_steps(RoundsConfig(**options, steps=3), rows) == 3


def test_each_round_learns_the_best_of_its_own_samples(folder: Path, model: Path) -> None:
    arguments = ["sft", "rounds_app:run", "--data", "tasks.jsonl", "--rounds", "2", "--model", str(model)]
    arguments += ["--samples", "4", "--agents", "writer", "--out", "out", "--device", "cpu", "--workers", "1"]
    arguments += ["--val", "tasks.jsonl", "--learning-rate", "3e-3", "--steps", "6", "--backend-options", "threads=1"]
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout.splitlines()[-1])
    assert [each["round"] for each in told["rounds"]] == [1, 2]
    assert told["checkpoint"] == "out/checkpoint"
    assert all(each["loss_after"] < each["loss_before"] for each in told["rounds"])
    assert told["reward_after"] == told["rounds"][-1]["held_out"]
    assert told["reward_before"] is not None
    store = open_store("out/lightning.db")
    traces = [trace for trace in traces_of(store) if ":t" in (trace.rollout_id or "")]
    store.close()
    calls = [(trace, node.call) for trace in traces for node in trace.chats]
    versions = {((t.rollout_id or "").partition(":t")[2][0], call.policy_version) for t, call in calls}
    assert versions == {("1", 0), ("2", 6)}  # the second round samples with what the first learned
    rewards: dict[str, list[float]] = {}
    for trace in traces:
        group = (trace.rollout_id or "").rpartition("-")[0]
        rewards.setdefault(group, []).append(sum(reward.value for reward in trace.rewards))
    for number in ("1", "2"):
        groups = [each for name, each in rewards.items() if f":t{number}" in name]
        worst = min(min(each) for each in groups)
        best = sum(max(each) > worst for each in groups)
        assert told["rounds"][int(number) - 1]["rows"] <= best  # equal lines are learned once
        assert told["rounds"][int(number) - 1]["reward"] == pytest.approx(sum(map(sum, groups)) / 12)


def test_rounds_write_tool_calls_as_the_run_did_that_their_model_comes_from(folder: Path, model: Path) -> None:
    shutil.copytree(model, folder / "warm" / "checkpoint")
    (folder / "warm" / "config.json").write_text('{"tool_format": "pythonic"}')
    config = RoundsConfig(
        target="rounds_app:run", tasks="tasks.jsonl", rounds=1, model="warm", samples=4, agents=("writer",), steps=1,
        out=folder / "out", device="cpu", workers=1,
    )  # fmt: skip
    rejection_sampling(config)
    assert json.loads((folder / "out" / "config.json").read_text())["tool_format"] == "pythonic"


def test_a_round_of_equal_rewards_is_refused_and_leaves_no_folder(folder: Path, model: Path) -> None:
    options: dict[str, Any] = {
        "target": "rounds_app:flat", "tasks": "tasks.jsonl", "rounds": 2, "model": str(model), "samples": 2,
        "out": folder / "out", "device": "cpu", "workers": 1,
    }  # fmt: skip
    with pytest.raises(NothingToLearnError, match="earned no more than the worst of the round"):
        rejection_sampling(RoundsConfig(**options))
    assert not (folder / "out").exists()
    with pytest.raises(ConfigError, match="held_out: for files and stores"):
        RoundsConfig(**options, held_out=0.1)


def drawn(number: int, *values: float, crashed: bool = False) -> Outcome:
    """One sample of a task; one that crashed may have succeeded when it was tried again."""
    rollout = Rollout(rollout_id=f"r:{number}", group_id="g", task={"q": "a"})
    attempt: Any = SimpleNamespace(attempt_id=f"{number}", error=None)
    rewards = tuple(Reward(rollout_id=rollout.rollout_id, attempt_id=f"{number}", value=value) for value in values)
    return Outcome(
        rollout=rollout, attempt=attempt if values else None, attempts=(attempt,), rewards=rewards,
        crash=SimpleNamespace(attempt_id="crash") if crashed else None,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("others", "failed", "better"),
    [
        ([drawn(1, crashed=True)], "lowest", True),
        ([drawn(1, 1.0, crashed=True)], "lowest", True),
        ([drawn(1, crashed=True)], 2.0, False),
        ([drawn(1, crashed=True)], "exclude", False),
        ([drawn(1)], "lowest", False),  # such as a lost worker: nobody's doing
        ([drawn(1, 0.5)], "lowest", True),
    ],
)
def test_a_failure_by_the_policys_doing_may_be_the_worst_of_the_round(
    others: list[Outcome], failed: Any, better: bool
) -> None:
    assert _is_better({"agent": "writer", "reward": 1.0}, [drawn(0, 1.0), *others], failed) is better


def test_an_agent_with_nothing_better_leaves_the_round_to_the_others(folder: Path, model: Path) -> None:
    options: dict[str, Any] = {
        "target": "rounds_app:one_sided", "tasks": "tasks.jsonl", "rounds": 1, "model": str(model), "samples": 4,
        "agents": "writer,rewriter", "device": "cpu", "workers": 1, "steps": 1, "out": folder / "out",
    }  # fmt: skip
    (taken,) = rejection_sampling(RoundsConfig(**options)).rounds
    assert taken.rows
    assert taken.left_out["earned no more than the worst of the round"]


def test_an_agent_that_is_silent_for_a_round_leaves_it_to_the_others(folder: Path, model: Path) -> None:
    options: dict[str, Any] = {
        "target": "rounds_app:run", "tasks": "tasks.jsonl", "rounds": 1, "model": str(model), "samples": 4,
        "device": "cpu", "workers": 1, "steps": 1, "out": folder / "out",
    }  # fmt: skip
    (taken,) = rejection_sampling(RoundsConfig(**options, agents="writer,critic")).rounds
    assert taken.rows


def test_rounds_end_and_are_kept_where_the_only_agent_falls_silent(folder: Path, model: Path) -> None:
    class Told(Silent):
        def note(self, text: str) -> None:
            notes.append(text)

    notes: list[str] = []
    options: dict[str, Any] = {
        "target": "rounds_app:once", "tasks": "tasks.jsonl", "rounds": 3, "model": str(model), "samples": 4,
        "agents": "writer", "device": "cpu", "workers": 1, "steps": 1, "out": folder / "out",
    }  # fmt: skip
    rounds = rejection_sampling(RoundsConfig(**options), Told())
    assert [taken.number for taken in rounds.rounds] == [1]
    assert notes[-1] == "there is no round 2: in its samples, agent 'writer' was never seen. Agents seen: critic"
    assert (rounds.checkpoint / "config.json").is_file()


def test_a_round_whose_best_is_too_long_is_nothing_to_learn_from(folder: Path, model: Path) -> None:
    options: dict[str, Any] = {
        "target": "rounds_app:run", "tasks": "tasks.jsonl", "rounds": 1, "model": str(model), "samples": 4,
        "device": "cpu", "workers": 1, "max_length": 3, "out": folder / "out",
    }  # fmt: skip
    with pytest.raises(NothingToLearnError, match=r"all . conversations are left out"):
        rejection_sampling(RoundsConfig(**options))
    assert not (folder / "out").exists()


def test_options_of_rounds_need_rounds(folder: Path, tiny_model: Path) -> None:
    for more, text in (
        (["--data", "tasks.jsonl"], "--data is an option of rejection sampling"),
        (["--samples", "3"], "--samples is an option of rejection sampling"),
        (["--max-tokens", "3"], "Write max_length"),
    ):
        result = CliRunner().invoke(cli, ["sft", "x.jsonl", "--model", str(tiny_model), *more])
        assert text in result.output
        assert result.exit_code != 0


def test_rounds_go_on_after_the_last_one_as_if_nothing_had_happened(
    folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lightning_trainer.kits.sft.rounds import loop as room

    options: dict[str, Any] = {
        "target": "rounds_app:run", "tasks": "tasks.jsonl", "val": "tasks.jsonl", "rounds": 2, "model": str(model),
        "samples": 4, "agents": "writer", "device": "cpu", "workers": 1, "learning_rate": 3e-3, "steps": 4,
        "backend_options": {"threads": 1}, "concurrency": 1,
    }  # fmt: skip
    whole = rejection_sampling(RoundsConfig(**options, out=folder / "whole")).to_json()
    taken = room.RoundLoop._round

    def first_alone(loop: Any, number: int) -> Any:
        if number == 2:
            raise AgentFailedError("the machine is gone")
        return taken(loop, number)

    monkeypatch.setattr(room.RoundLoop, "_round", first_alone)
    with pytest.raises(AgentFailedError, match="the machine is gone"):
        rejection_sampling(RoundsConfig(**options, out=folder / "cut"))
    monkeypatch.setattr(room.RoundLoop, "_round", taken)
    wrong = CliRunner().invoke(cli, ["sft", "--resume", "cut", "--seed", "3"])
    assert "Leave out seed" in wrong.output
    tasks = (folder / "tasks.jsonl").read_text()
    (folder / "tasks.jsonl").write_text(tasks + '{"question": "another"}\n')
    assert "its tasks changed since" in " ".join(CliRunner().invoke(cli, ["sft", "--resume", "cut"]).output.split())
    (folder / "tasks.jsonl").write_text(tasks)
    result = CliRunner().invoke(cli, ["sft", "--resume", "cut"])
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout.splitlines()[-1])
    assert told["rounds"] == whole["rounds"]
    assert told["reward_before"] == whole["reward_before"]
    weights = [(folder / run / "checkpoint" / "model.safetensors").read_bytes() for run in ("whole", "cut")]
    assert weights[0] == weights[1]
    assert not list((folder / "cut").glob("resume*"))
    again = CliRunner().invoke(cli, ["sft", "--resume", "cut"])
    assert "can't be resumed" in again.output
    assert again.exit_code == 2
