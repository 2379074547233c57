"""Whole runs that sample while they learn: what overlaps, what is learned from, and what does not go together."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("openai")
pytestmark = pytest.mark.torch

from lightning_spans.errors import ConfigError
from lightning_spans.store import open_store
from lightning_trainer import train
from lightning_trainer.backends.torch.learner import TorchLearner
from lightning_trainer.run.data import batch_at, load_tasks
from lightning_trainer.run.interrupts import SavedInterrupt
from support.training.programs import SAY, folder_with
from support.training.tiny_runs import StopAt, config, lines, rollouts_of, tasks_of

AGENT = (
    SAY
    + '''
import asyncio
from pathlib import Path

async def run(task):
    return letters(await say("writer", task["q"]))

async def patient(task):
    """Between its two calls, a rollout of the second batch waits for the update of the first to end."""
    draft = await say("writer", task["q"])
    if task["q"] in Path("second").read_text().splitlines():
        Path("answered").touch()
        while not Path("updated").exists():
            await asyncio.sleep(0.05)
    return letters(await say("writer", task["q"] + draft))
'''
)
folder = folder_with(5, async_agent=AGENT)


def test_agents_work_while_a_step_learns_and_each_call_has_the_version_that_sampled_it(
    tiny_model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learn = TorchLearner.update

    def update(self: TorchLearner, rows: Any) -> dict[str, float]:
        while not Path("answered").exists():
            time.sleep(0.01)
        try:
            return learn(self, rows)
        finally:
            Path("updated").touch()

    monkeypatch.setattr(TorchLearner, "update", update)
    tasks = load_tasks(folder / "tasks.jsonl")
    (folder / "second").write_text("\n".join(tasks[place]["q"] for place in batch_at(1, len(tasks), 2, 0)))
    train(config(tiny_model, target="async_agent:patient", steps=3, staleness=1, concurrency=4))
    store = open_store("out/lightning.db")
    by_attempt: dict[str, set[int]] = {}
    for call in store.calls():
        by_attempt.setdefault(call.attempt_id or "", set()).add(call.policy_version or 0)
    store.close()
    assert {0, 1} in by_attempt.values(), "an attempt went on while the weights changed"
    assert [line["calls_trained"] for line in lines(folder / "out")] == [16.0] * 3
    assert max(line["staleness_max"] for line in lines(folder / "out")) == 1.0
    assert all(line["engine_gap/tiny"] < 1e-3 for line in lines(folder / "out") if "engine_gap/tiny" in line)


def test_a_run_that_is_resumed_with_rollouts_in_flight_learns_from_each_task_once(
    tiny_model: Path, folder: Path
) -> None:
    chosen = {"target": "async_agent:run", "staleness": 2, "save_every": 1, "steps": 5}
    with pytest.raises(SavedInterrupt):
        train(config(tiny_model, **chosen), StopAt(1))
    status = {rollout.rollout_id.rpartition(":")[2]: rollout.status for rollout in rollouts_of(folder / "out")}
    assert {name.partition("-")[0] for name in status} >= {"t2", "t3"}, "two batches were ahead"
    assert set(status.values()) <= {"succeeded", "cancelled"}
    train(config(tiny_model, **{**chosen, "out": None, "resume": "out"}))
    steps = lines(folder / "out")
    assert [line["step"] for line in steps] == [0, 1, 2, 3, 4]
    assert [line["calls_trained"] for line in steps] == [8.0] * 5
    assert max(line["staleness_max"] for line in steps) <= 2
    store = open_store("out/lightning.db")
    consumed = Counter(name.rpartition(":")[2] for name in consumed_groups(store))
    store.close()
    assert set(consumed.values()) == {1}
    assert len(consumed) == 10
    tasks = load_tasks(folder / "tasks.jsonl")
    for step in range(5):
        expected = [tasks[place] for place in batch_at(step, len(tasks), 2, 0)]
        assert [tasks_of(folder / "out")[f"t{step}-{place}-0"] for place in range(2)] == expected


def consumed_groups(store: Any) -> list[str]:
    """Groups that a step has learned from: each is refused to another consumer."""
    groups = {rollout.group_id for rollout in store.rollouts()}
    return [group for group in groups if not store.consume_group(group, "the test")]


def test_a_goal_that_is_reached_cancels_what_was_queued_ahead(tiny_model: Path, folder: Path) -> None:
    result = train(config(tiny_model, target="async_agent:run", staleness=1, steps=50, until=-1.0))
    assert result.steps == 2
    status = {rollout.rollout_id.rpartition(":")[2][:2]: rollout.status for rollout in rollouts_of(folder / "out")}
    assert status == {"t0": "succeeded", "t1": "succeeded", "t2": status["t2"]}
    assert status["t2"] in {"cancelled", "succeeded"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"credit": "counterfactual"}, "credit = counterfactual"),
        ({"orders": 2, "policies": "writer=lora,checker=lora", "agents": "writer,checker"}, "orders = 2"),
        ({"teacher": "self"}, "teacher = self"),
        ({"resample": 1}, "resample = 1"),
    ],
)
def test_what_needs_the_newest_weights_is_refused_by_name(
    tiny_model: Path, folder: Path, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=f"staleness = 1.*{words}|{words}.*staleness = 1"):
        train(config(tiny_model, target="async_agent:run", staleness=1, **options))
    assert not (folder / "out").exists()


def test_rows_of_older_weights_are_corrected_by_default() -> None:
    def of(**options: Any) -> tuple[Any, Any]:
        chosen = config(Path("m"), staleness=1, **options)
        return chosen.old_logprobs, chosen.importance_cap

    assert of() == of(backend="verl") == ("recompute", 2.0)
    assert of(importance_cap=5.0) == ("recompute", 5.0)
    assert of(importance_moment=0.04) == ("recompute", None)
    assert of(old_logprobs="engine") == ("engine", None)
    assert config(Path("m")).old_logprobs is None
