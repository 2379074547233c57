"""Two agents that take turns, and two with baselines of their own: whole runs of a tiny model."""

# ruff: noqa: F811 - a fixture is imported

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from lightning_spans.errors import ConfigError
from lightning_trainer import train
from lightning_trainer.kits.schedules.alternate import FROZEN, AlternateKind
from lightning_trainer.reasons.reason import slug
from lightning_trainer.run.state import read_state
from support.training.policies import calls, config, digest, folder  # noqa: F401 - a fixture among them
from support.training.tiny_runs import lines

TURNS: dict[str, Any] = {
    "target": "policy_agent:three", "policies": "writer=lora,rewriter=lora,checker=base", "val": "val.jsonl",
    "val_every": 1, "save_every": 1, "keep": 9, "schedule": "alternate:1",
}  # fmt: skip


@pytest.fixture
def held_out(folder: Path) -> Path:
    (folder / "val.jsonl").write_text(json.dumps({"q": "ask"}) + "\n")
    return folder


def test_one_policy_learns_at_a_time_and_the_others_have_their_best_weights(tiny_model: Path, held_out: Path) -> None:
    train(config(tiny_model, steps=2, **TURNS))
    train(config(tiny_model, steps=3, resume="out", out=None, **TURNS))
    out = held_out / "out"
    weights = {step: {n: digest(out / f"checkpoints/step-{step:06d}" / n) for n in ("writer", "rewriter")}
               for step in (1, 2, 3)}  # fmt: skip
    assert weights[1]["rewriter"] != weights[2]["rewriter"]
    turns = lines(out, "turn")
    assert [(line["policy"], line.get("restored")) for line in turns] == [
        ("writer", None), ("rewriter", "writer"), ("writer", "rewriter")
    ]  # fmt: skip
    for line, turn in zip(lines(out), ("writer", "rewriter", "writer"), strict=True):
        assert [name for name in ("writer", "rewriter") if line[f"turn/{name}"]] == [turn]
        assert line[f"calls_dropped/{slug(FROZEN)}"] == 6
        assert line["calls_trained"] == 6
    best = {name: digest(out / "best" / name)["adapter_model.safetensors"] for name in ("writer", "rewriter")}
    assert weights[2]["writer"]["adapter_model.safetensors"] in {best["writer"], *weights[1]["writer"].values()}
    versions = {(c.policy, c.policy_version) for c in calls(out) if c.policy == "checker"}
    assert versions == set()


def test_baselines_of_agents_are_in_the_checkpoint(tiny_model: Path, folder: Path) -> None:
    result = train(config(tiny_model, steps=2, algorithm="rae", group_size=2))
    assert result.checkpoint is not None
    kept = read_state(result.checkpoint.resolve()).kept["rae"]
    assert set(kept) == {"writer", "rewriter"}
    last = lines(folder / "out")[-1]
    assert {name: last[f"baseline/{name}"] for name in kept} == kept


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"policies": "writer=lora"}, "alternates between policies"),
        ({"val_every": None}, "which only validations find"),
        ({"reward": "judge"}, "a judge's scores can't be compared across validations"),
        ({"judge": {"rubric": "good"}}, "a judge's scores can't be compared across validations"),
        ({"schedule": "alternate:3", "val_every": 2}, "val_every = 2 does not divide 3. Set val_every to 1 or 3"),
        ({"schedule": "random"}, "write alternate:K"),
        ({"with_prompts": True}, "with_prompts trains every agent that an instruction helped"),
    ],
)
def test_what_cannot_take_turns_is_refused(held_out: Path, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        AlternateKind().check(config(held_out, **{**TURNS, **options}))
