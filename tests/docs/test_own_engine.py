"""The engine and the learner of docs/how-to/own-engine.md: runs, versions, and the gradient of the torch backend."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("openai")
pytestmark = pytest.mark.torch

import torch
from transformers import AutoModelForCausalLM

from lightning_spans import hooks
from lightning_spans.errors import ConfigError
from lightning_spans.store import open_store
from lightning_trainer import registry, train
from lightning_trainer.backends.torch.learner import TorchLearner
from lightning_trainer.engines.contract import EngineRequest
from lightning_trainer.gateway.engine import set_tool_format, tool_format
from lightning_trainer.rl.rows import Row
from support.training.programs import put_programs
from support.training.tiny_runs import PROGRAMS as TINY
from support.training.tiny_runs import config, lines

PROGRAMS = Path(__file__).parent / "engines"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    put_programs(tmp_path, 5, **TINY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(PROGRAMS))
    names = ("own_engine", "own_learner")
    for name in names:
        hooks.register(importlib.import_module(name), name)
    yield tmp_path
    for name in names:
        hooks.unregister(name)


@pytest.mark.parametrize(
    ("more", "gaps"),
    [
        ({}, ["engine_gap/tiny"]),
        (
            {"target": "tiny_agent:two", "policies": "writer=lora,rewriter=lora", "agents": None},
            ["engine_gap/writer", "engine_gap/rewriter"],
        ),
    ],
)
def test_the_engine_samples_each_version_exactly(more: Any, gaps: list[str], tiny_model: Path, folder: Path) -> None:
    train(config(tiny_model, engine="copies", steps=2, learning_rate=1e-3, staleness=1, **more))
    for gap in gaps:
        assert max(line[gap] for line in lines(folder / "out") if gap in line) < 1e-4
    store = open_store("out/lightning.db")
    versions = {call.policy_version for call in store.calls()}
    store.close()
    assert versions <= {0, 1}
    assert {0} < versions or max(line["staleness_max"] for line in lines(folder / "out")) == 1


def test_an_engine_that_does_not_read_the_tool_format_gets_it(tiny_model: Path, folder: Path) -> None:
    request = EngineRequest(model=tiny_model, tool_format="lfm")
    kind = importlib.import_module("own_engine").CopiesKind()
    learner = TorchLearner(tiny_model, device="cpu", dtype="float32", sampler=(kind, request))
    assert [tool_format(engine) for engine in learner.engines] == ["lfm"]
    learner.close()


def test_an_engine_that_accepts_no_tool_format_is_refused() -> None:
    class Slotted:
        __slots__ = ()

    set_tool_format([Slotted()], None)
    with pytest.raises(
        ConfigError, match=r"--tool-format lfm can't be used: Slotted.tool_format can't be set. Make it"
    ):
        set_tool_format([Slotted()], "lfm")


def test_the_learner_takes_the_step_of_the_torch_backend(tiny_model: Path, folder: Path) -> None:
    random, batch = np.random.default_rng(0), []
    for length in (9, 30, 14):
        mask = np.arange(length) >= 5
        batch.append(
            Row(
                tokens=random.integers(3, 250, length).astype(np.int32), mask=mask,
                logprobs=np.where(mask, random.uniform(-7, -4, length), 0.0).astype(np.float32),
                advantages=np.where(mask, random.normal(0, 1, length), 0.0), lengths=(int(mask.sum()),),
                agent="writer", attempt_id=f"a{length}", rollout_id=f"r{length}", group_id="g", policy="tiny",
            )
        )  # fmt: skip
    own = importlib.import_module("own_learner").PlainLearner(
        config(tiny_model, backend="plain", learning_rate=1e-3, backend_options={})
    )
    reference = TorchLearner(tiny_model, device="cpu", dtype="float32", learning_rate=1e-3, weight_decay=0.0)
    told, wanted = own.update(batch), reference.update(batch)
    assert told["loss"] == pytest.approx(wanted["loss"], abs=1e-6)
    assert told["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-5)
    start = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    steps = [moved(each, start) for each in (own.model, reference._model.causal)]
    assert float(torch.cosine_similarity(*steps, dim=0)) > 0.9999
    reference.close()


def moved(model: Any, start: Any) -> torch.Tensor:
    before = dict(start.named_parameters())
    return torch.cat([(its.detach() - before[name].detach()).flatten() for name, its in model.named_parameters()])


def test_the_learner_runs_and_goes_on_as_if_it_had_not_stopped(tiny_model: Path, folder: Path) -> None:
    chosen = {"backend": "plain", "learning_rate": 1e-3, "save_every": 1, "backend_options": {}}
    train(config(tiny_model, steps=3, **chosen))
    train(config(tiny_model, steps=2, **{**chosen, "out": "again"}))
    train(config(tiny_model, steps=3, **{**chosen, "out": None, "resume": "again"}))
    whole, parts = ([line["reward"] for line in lines(folder / name)] for name in ("out", "again"))
    assert whole == parts
    state = json.loads((folder / "out/checkpoint/plain.json").read_text())
    assert state["version"] == 3


def test_both_refuse_what_they_do_not_do(tiny_model: Path, folder: Path) -> None:
    with pytest.raises(ConfigError, match="does not support kl_coef, lora_rank"):
        train(config(tiny_model, backend="plain", kl_coef=0.1, lora_rank=4))
    with pytest.raises(ConfigError, match="has no options"):
        train(config(tiny_model, engine="copies", engine_url="http://127.0.0.1:9/v1"))
    assert {"copies"} <= registry.registrations("engine").keys()
