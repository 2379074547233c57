"""vLLM under adapters that were trained over rounded weights: it samples from the same ones, or is refused."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("torch")
pytest.importorskip("bitsandbytes")
pytestmark = pytest.mark.torch

from lightning_spans.errors import ConfigError
from lightning_trainer import train
from lightning_trainer.engines.vllm.folders import ram_folder
from lightning_trainer.models.bases import NEEDED, bits_in
from support.models.tiny import make_tiny_model
from support.training.policies import config, folder, lines  # noqa: F401 - a fixture among them

NAMES = ("writer", "rewriter")


def test_vllm_samples_from_the_quantised_weights_that_the_learner_computes_with(tiny_model, folder, scripted):  # noqa: F811
    before = set(ram_folder().glob(f"lightning-engine-{os.getpid()}-*"))
    train(config(tiny_model, engine="vllm", base_bits=4, steps=2))
    for line in lines(folder / "out"):
        for name in NAMES:
            assert line[f"engine_gap/{name}"] < 1e-3
            assert line[f"engine_correlation/{name}"] > 0.999
    assert set(ram_folder().glob(f"lightning-engine-{os.getpid()}-*")) == before, "the copy of the model is removed"


@pytest.mark.parametrize("several", [True, False])
def test_a_run_that_starts_from_its_checkpoint_needs_no_option_for_that(tiny_model, folder, scripted, several):  # noqa: F811
    kind = {} if several else {"policies": {}, "agents": (*NAMES, "checker")}
    train(config(tiny_model, base_bits=4, steps=1, **kind))
    with pytest.raises(ConfigError, match="do not have the learner's quantised weights"):
        train(config(folder / "out", out="none", engine_url="http://127.0.0.1:9/v1", **kind))
    alone = {} if several else {"lora_rank": 0}
    train(config(folder / "out", engine="vllm", steps=1, out="next", **kind, **alone))
    assert bits_in(folder / "next" / "checkpoint" / NEEDED) == 4
    (line,) = lines(folder / "next")
    gaps = [value for name, value in line.items() if name.startswith("engine_gap/")]
    assert len(gaps) == (2 if several else 1)
    assert max(gaps) < 1e-3


@pytest.fixture
def gpu(tmp_path, monkeypatch):
    """A GPU of 24 GB, as far as plans can see."""
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho 24564\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")


ITSELF = {"engine": "vllm", "base_bits": 4, "engine_options": {"quantization": "bitsandbytes"}}


def test_vllm_that_rounds_the_weights_itself_has_the_learners(folder, scripted, gpu):  # noqa: F811
    model = make_tiny_model(folder / "model", dtype="bfloat16")
    train(config(model, **ITSELF, steps=2))
    start = next(event for event in scripted() if "start" in event)
    assert (start["model"], start["start"][start["start"].index("--quantization") + 1]) == (str(model), "bitsandbytes")
    for line in lines(folder / "out"):
        for name in NAMES:
            assert line[f"engine_gap/{name}"] < 2e-2, "bfloat16 in the learner"
            assert line[f"engine_correlation/{name}"] > 0.999


def test_vllm_that_would_round_to_other_weights_is_refused(tiny_model, folder, scripted, gpu, monkeypatch):  # noqa: F811
    model = make_tiny_model(folder / "model", dtype="bfloat16")
    for given, changes, words in (
        (model, {"base_bits": 8}, "rounds to 4 bits. Set base_bits = 4"),
        (model, {"base_bits": None}, "rounds to 4 bits. Set base_bits = 4"),
        (model, {"dtype": "float32"}, "which must be bfloat16"),
        (tiny_model, {}, "which must be bfloat16"),
        (model, {"device": "cpu"}, "needs a GPU"),
    ):
        with pytest.raises(ConfigError, match=words):
            train(config(given, **{**ITSELF, **changes}))
