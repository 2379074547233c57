"""A run whose rewards a judge gives: a tiny model learns what a scripted judge prefers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("openai")
pytestmark = pytest.mark.torch

from lightning_conformance import ScriptedServer
from lightning_conformance.plugins.script import Reply
from lightning_spans.errors import ConfigError, LightningError
from lightning_spans.store import open_store
from lightning_trainer import TrainConfig, train
from lightning_trainer.run.train import describe
from support.training.programs import put_programs
from support.training.tiny_runs import AGENT


def letters(body: dict[str, Any], seen: int) -> Reply:
    """Score each attempt by its letters."""
    told = next(m["content"] for m in body["messages"] if m["role"] == "user")
    answers = re.findall(r'<attempt number="\d+">\n\[writer\] assistant: (.*?)\n</attempt>', told, re.DOTALL)
    good = [sum(c.isascii() and c.isalpha() for c in answer) / max(1, len(answer)) for answer in answers]
    return Reply(text=json.dumps({"scores": [{"attempt": n, "score": s} for n, s in enumerate(good, 1)]}))


def test_a_run_learns_from_a_judge_alone(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch):
    put_programs(tmp_path, ({"q": q} for q in "ab"), judged_app=AGENT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    given: dict[str, Any] = {
        "target": "judged_app:run", "data": tmp_path / "tasks.jsonl", "model": str(tiny_model), "steps": 2,
        "workers": 1, "batch_size": 2, "group_size": 4, "out": tmp_path / "run", "dtype": "float32", "reward": "judge",
    }  # fmt: skip
    with pytest.raises(ConfigError, match="endpoint is missing"):
        train(TrainConfig(**given))
    assert not (tmp_path / "run").exists()
    with ScriptedServer(letters) as server:
        result = train(TrainConfig(**given, judge={"endpoint": server.url, "model": "j"}))
    assert result.steps == 2
    store = open_store(str(tmp_path / "run/lightning.db"))
    rewards = store.rewards()
    store.close()
    assert {reward.source for reward in rewards} == {"judge"}  # and not what the program returned
    assert len(rewards) == 16
    assert result.curve[0] == pytest.approx(sum(r.value for r in rewards[:8]) / 8)
    assert (tmp_path / "run/judge.jsonl").exists()


def test_a_dry_run_asks_the_judge(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch):
    put_programs(tmp_path, ({"q": q} for q in "ab"), judged_try=AGENT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    given: dict[str, Any] = {
        "target": "judged_try:run", "data": tmp_path / "tasks.jsonl", "model": str(tiny_model), "steps": 2,
        "workers": 1, "batch_size": 2, "group_size": 4, "dtype": "float32", "reward": "judge",
    }  # fmt: skip
    with ScriptedServer(letters) as server:
        facts = describe(TrainConfig(**given, judge={"endpoint": server.url, "model": "j"})).facts
        asked = len(server.requests)
    assert asked == 2
    assert (facts["samples"], facts["signal"] > 0) == (4, True)
    assert facts["reward"] is not None
    dead = {"endpoint": "http://127.0.0.1:9/v1", "model": "j", "retries": 0}
    with pytest.raises(LightningError, match="the judge gave no verdict"):
        describe(TrainConfig(**given, judge=dead))
