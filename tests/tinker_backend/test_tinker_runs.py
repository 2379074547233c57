"""Whole runs on a scripted Tinker server: learn, resume, forecast and keep to a budget."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from lightning_spans.store import open_store
from lightning_trainer import TrainConfig, train
from lightning_trainer.backends.tinker.bill import BudgetSpentError
from lightning_trainer.backends.tinker.errors import TinkerError
from lightning_trainer.backends.tinker.learner import TinkerLearner
from lightning_trainer.cli import cli
from lightning_trainer.run.data import batch_at, load_tasks
from support.tinker import Server, StatusError
from support.training.programs import CLIENT, put_programs

pytest.importorskip("openai")

AGENT = (
    CLIENT
    + '''
import time
from pathlib import Path
def say(name, messages):
    with agent(name):
        reply = client.chat.completions.create(model="m", messages=messages, max_tokens=6)
    return reply.choices[0].message.content or ""

def run(task):
    """Two agents that answer in a row; the first goes on from its own answer. Long texts are good."""
    asked = [{"role": "user", "content": task["q"]}]
    first = say("writer", asked)
    second = say("writer", [*asked, {"role": "assistant", "content": first}, {"role": "user", "content": "more"}])
    third = say("checker", asked)
    return {"writer": float(len(first) + len(second)), "checker": float(len(third))}
'''
)

PATIENT = """
def patient(task):
    say("writer", [{"role": "user", "content": task["q"]}])
    if task["q"] in Path("second").read_text().splitlines():
        Path("answered").touch()
        while not Path("updated").exists():
            time.sleep(0.05)
    return run(task)
"""

PRICES = {"as_of": "2026-11-01", "per": 1000, "models": {}}


@pytest.fixture
def folder(tmp_path: Path, model: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> Path:
    put_programs(tmp_path, 4, agent_of_tinker=AGENT + PATIENT)
    table = {**PRICES, "models": {str(model): {"prefill": 1.0, "sample": 3.0, "train": 2.0}}}
    (tmp_path / "prices.json").write_text(json.dumps(table))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def options(model: Path, **more: Any) -> dict[str, Any]:
    return {
        "target": "agent_of_tinker:run", "data": "tasks.jsonl", "model": str(model), "backend": "tinker",
        "tinker_url": "http://tinker.invalid", "policies": "writer=lora,checker=lora", "lora_rank": 2, "steps": 2,
        "batch_size": 4, "group_size": 4, "workers": 1, "out": "out", "save_every": 1, "prices": "prices.json", **more,
    }  # fmt: skip


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "out/metrics.jsonl").read_text().splitlines()]


def test_two_agents_learn_on_two_adapters_and_the_run_resumes(folder: Path, model: Path, server: Server) -> None:
    server.averages, server.snapshots = "step", False
    result = train(TrainConfig(**options(model)))
    assert result.steps == 2
    assert (folder / "out/checkpoint/writer/adapter_model.safetensors").is_file()
    told = [line for line in lines(folder) if line["kind"] == "train"]
    assert all(
        line["policy_version_newest/writer"] == line["step"] + 1
        for line in told
        if "policy_version_newest/writer" in line
    )
    assert all(0 < line["cost"] < line["cost_unmerged"] for line in told)
    spent = told[-1]["cost_total"]
    train(TrainConfig(**options(model, out=None, resume="out", steps=3)))
    last = [line for line in lines(folder) if line["kind"] == "train"][-1]
    assert (last["step"], server.asked.count("restore")) == (2, 2)
    assert last["cost_total"] == pytest.approx(spent + last["cost"])


@pytest.mark.parametrize("more", [{}, {"update_epochs": 2, "kl_coef": 0.1}])
def test_dry_run_forecasts_the_bill_within_a_fifth(more: dict[str, Any], folder: Path, model: Path) -> None:
    given = options(model, steps=3, **more)
    target = given.pop("target")
    flags = [part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    tried = CliRunner().invoke(cli, ["train", target, *flags, "--dry-run", "--json"])
    assert tried.exit_code == 0, tried.output
    forecast = json.loads(tried.stdout.splitlines()[-1])["bill"]
    assert "the bill:" in tried.stdout
    assert not (folder / "out").exists()
    train(TrainConfig(**options(model, steps=3, **more)))
    spent = [line for line in lines(folder) if line["kind"] == "train"][-1]["cost_total"]
    assert forecast["cost"] == pytest.approx(spent, rel=0.2)
    assert forecast["cost_unmerged"] > forecast["cost"]


@pytest.mark.parametrize("staleness", [0, 1])
def test_run_that_reaches_its_budget_is_saved_and_says_how_to_continue(
    staleness: int, folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spent = []
    monkeypatch.setattr(TinkerLearner, "close", lambda self: spent.append(self.bill.spent))
    with pytest.raises(BudgetSpentError, match="--resume"):
        train(TrainConfig(**options(model, steps=50, max_cost=40.0, staleness=staleness)))
    told = [line for line in lines(folder) if line["kind"] == "train"]
    assert 0 < told[-1]["cost_total"] <= spent[0] <= 40.0
    assert json.loads((folder / "out/checkpoint/state.json").read_text())["step"] == len(told)


@pytest.mark.parametrize("snapshots", [True, False])
def test_agents_work_while_a_step_learns_and_each_call_has_the_version_that_sampled_it(
    snapshots: bool, folder: Path, model: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rollout of the second batch waits, between its calls, for the update of the first to end."""
    learn, server.snapshots = TinkerLearner.update, snapshots

    def update(self: TinkerLearner, rows: Any) -> dict[str, float]:
        while not Path("answered").exists():
            time.sleep(0.01)
        try:
            return learn(self, rows)
        finally:
            Path("updated").touch()

    monkeypatch.setattr(TinkerLearner, "update", update)
    tasks = load_tasks(folder / "tasks.jsonl")
    (folder / "second").write_text("\n".join(tasks[place]["q"] for place in batch_at(1, len(tasks), 2, 0)))
    more = {"target": "agent_of_tinker:patient", "staleness": 1, "batch_size": 2, "steps": 2, "concurrency": 16}
    train(TrainConfig(**options(model, **more)))
    store = open_store("out/lightning.db")
    versions: dict[str, set[int]] = {}
    for call in store.calls():
        versions.setdefault(call.attempt_id or "", set()).add(call.policy_version or 0)
    store.close()
    told = [line for line in lines(folder) if line["kind"] == "train"]
    assert {0, 1} in versions.values(), "an attempt went on while the weights changed"
    assert [line["calls_trained"] for line in told] == [32.0, 32.0], "nothing is dropped"
    assert [line["staleness_max"] for line in told] == [0.0, 1.0]
    assert all("importance_capped" in line for line in told)


def test_update_that_fails_leaves_the_last_checkpoint_and_nothing_is_learned_twice(
    folder: Path, model: Path, server: Server
) -> None:
    train(TrainConfig(**options(model, steps=1)))
    server.fail["optim_step"] = StatusError(500, "the engine died")
    server.asked.clear()
    with pytest.raises(TinkerError):
        train(TrainConfig(**options(model, out=None, resume="out", steps=2)))
    assert json.loads((folder / "out/checkpoint/state.json").read_text())["step"] == 1
    server.fail.clear()
    result = train(TrainConfig(**options(model, out=None, resume="out", steps=2)))
    assert result.steps == 2
