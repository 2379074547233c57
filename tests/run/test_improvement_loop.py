"""`lightning-rl loop` with the real training and evaluation: each round continues from what the last one promoted."""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("openai")
pytestmark = pytest.mark.torch

from lightning_spans.schema.calls import Call, Choice
from lightning_spans.store import open_store
from lightning_trainer.config.files import read_kept
from lightning_trainer.kits.loop.methods import adapter
from lightning_trainer.run.train import train
from support.cli import call
from support.training.programs import CLIENT

AGENT = (
    CLIENT
    + """
def run(task):
    with agent("writer"):
        messages = [{"role": "user", "content": task["question"]}]
        said = client.chat.completions.create(model="gpt-9", max_tokens=5, messages=messages)
    return sum(letter.isascii() and letter.isalpha() for letter in said.choices[0].message.content or "") / 5
"""
)
CONFIG = """
agent = "writer"
base = "base"
stable = "old"
approval = false

[select]
least = 6
held_out = 0.3
min_age_minutes = 0
assume_consent = true

[train]
model = "model"
steps = 2
batch_size = 2
group_size = 4
workers = 1
device = "cpu"
lora_rank = 8
learning_rate = 3e-2
backend_options = { threads = 1, slots = 16 }

[evaluate]
samples = 1
min_difference = -1.0
"""


def record_traces(path: Path, first: int) -> None:
    message = {"role": "assistant", "content": "fine"}
    with closing(open_store(str(path))) as store:
        store.add_calls(
            [
                Call(
                    call_id=f"{place}", response_id=f"{place}", start_ns=place + 1, end_ns=place + 2, policy="old",
                    policy_version=0, agent="writer", origin="live", choices=(Choice(0, None, None, "stop", message),),
                    request={"messages": [{"role": "user", "content": f"{place}"}]},
                )
                for place in range(first, first + 8)
            ]
        )  # fmt: skip


def test_a_round_trains_and_evaluates_and_the_next_continues_from_its_checkpoint(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_model, tmp_path / "model")
    (tmp_path / "program.py").write_text(AGENT)
    (tmp_path / "loop.toml").write_text(CONFIG)
    store, out = tmp_path / "lightning.db", tmp_path / "loops" / "writer"
    record_traces(store, 0)

    def go() -> str:
        result = call("loop", "program:run", "--config", "loop.toml", "--store", store, "--no-wait")
        assert result.exit_code == 0, result.output
        return result.stdout

    def train_and_stop(*given: Any) -> None:
        train(*given)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(adapter, "train", train_and_stop)
        assert call("loop", "program:run", "--config", "loop.toml", "--store", store, "--no-wait").exit_code == 130
    assert not (out / "1" / "train.json").exists()
    trained = (out / "1" / "run" / "metrics.jsonl").read_bytes()
    assert "shadow     waiting  0 copies of live calls, 200 are needed" in go()
    assert (out / "1" / "run" / "metrics.jsonl").read_bytes() == trained, "the run is not trained again"
    assert json.loads((out / "1" / "evaluate.json").read_text())["facts"]["difference"] is not None
    for words in (("canary",), ("promote", "--override", "--reason", "a test")):
        assert call("deploy", *words, "--agent", "writer", "--store", store).exit_code == 0
    record_traces(store, 8)
    assert "promoted. a test" in go()
    assert "shadow     waiting" in go()
    first = json.loads((out / "1" / "train.json").read_text())["facts"]["checkpoint"]
    assert read_kept(out / "2" / "run", "")["model"] == first
    asked = json.loads((out / "2" / "evaluation" / "eval.json").read_text())["config"]
    assert asked["against"] == first
