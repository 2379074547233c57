"""A whole run in which a held-out reward falls: the policy returns, learns more slowly, and both are recorded."""

# ruff: noqa: F811 - a fixture is imported

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from lightning_trainer import train
from lightning_trainer.report.progress import Silent
from lightning_trainer.run.cliffs import PolicyReturn
from lightning_trainer.run.state import read_state
from support.training.policies import config, folder  # noqa: F401 - a fixture among them
from support.training.tiny_runs import lines

FALLING = """
from pathlib import Path
from policy_agent import letters, say

async def run(task):
    draft = await say("writer", task["q"])
    final = await say("rewriter", task["q"] + draft)
    if task.get("held_out"):
        return {"writer": float(not Path("fallen").exists()), "rewriter": 1.0}
    return {"writer": letters(draft), "rewriter": letters(final)}
"""


class Falling(Silent):
    """Lets the writer's held-out reward fall once the first step was taken."""

    def step(self, step: int, metrics: Any) -> None:
        Path("fallen").touch()


def test_a_fallen_policy_returns_to_its_best_weights_and_learns_slowly(tiny_model: Path, folder: Path) -> None:
    (folder / "falling.py").write_text(FALLING)
    val = "".join(json.dumps({"q": f"ask {n}", "held_out": True}) + "\n" for n in range(8))
    (folder / "val.jsonl").write_text(val)
    options: dict[str, Any] = {
        "target": "falling:run", "policies": "writer=lora,rewriter=lora", "val": "val.jsonl", "val_every": 1,
        "save_every": 1, "rollback_on_cliff": True,
    }  # fmt: skip
    result = train(config(tiny_model, steps=1, **options), progress=Falling())
    [back] = lines(folder / "out", "rollback")
    assert (back["policy"], back["step"], back["to_step"], back["learning_rate_factor"]) == ("writer", 1, 0, 0.1)
    assert result.rollbacks == (PolicyReturn("writer", after_steps=1, to_step=0, learning_rate_factor=0.1),)
    [returned] = result.returned_last()
    assert returned.startswith("writer fell in the last validation: the checkpoint has its weights after 0 steps")
    assert "cliff/writer" in {alarm.name for alarm in result.alarms}
    assert result.checkpoint is not None
    weights = {name: (folder / "out" / "best" / name / "adapter_model.safetensors") for name in ("writer", "rewriter")}
    assert weights["writer"].read_bytes() == (result.checkpoint / "writer" / "adapter_model.safetensors").read_bytes()
    assert read_state(result.checkpoint.resolve()).slowed == {"writer": 0.1}
    validations = lines(folder / "out", "val")
    assert validations[-1]["from_best/writer"] == -1.0
    assert {"new_prompts/writer", "new_prompts/rewriter"} <= validations[-1].keys()
    assert validations[-1]["new_prompts/writer"] == 0.0
    (weights["writer"].parent / "step.json").write_text('{"step": 2}')  # as after a second step
    train(config(tiny_model, steps=2, out=None, resume="out", **options), progress=Falling())
    assert [its.exists() for its in weights.values()] == [False, True]
    assert lines(folder / "out", "rollback")[0] == back
    assert {"kl_base/writer", "entropy/writer"} <= lines(folder / "out")[-1].keys()
