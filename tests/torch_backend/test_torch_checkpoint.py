"""Checkpoints: exact resume, loadable by others, written whole, and refused when they belong to something else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from lightning_spans.errors import ConfigError
from lightning_trainer.backends.torch import checkpoint
from support.models.tiny import make_tiny_model
from support.models.updates import make_backend, make_batch

pytestmark = pytest.mark.torch

OPTIONS = [
    pytest.param({"dtype": "float32"}, id="float32"),
    pytest.param({"dtype": "bfloat16"}, id="bfloat16"),
    pytest.param({"dtype": "bfloat16", "lora_rank": 2}, id="lora"),
]


@pytest.mark.parametrize("options", OPTIONS)
def test_resume_is_exact_to_the_bit(tiny_model: Path, tmp_path: Path, options: dict) -> None:
    def losses(backend) -> list[tuple[float, float]]:
        found = [backend.update(make_batch(seed)) for seed in (2, 3)]
        return [(metrics["loss"], metrics["grad_norm"]) for metrics in found]

    backend = make_backend(tiny_model, learning_rate=1e-3, **options)
    for seed in (0, 1):
        backend.update(make_batch(seed))
    backend.save(tmp_path / "step")
    drawn_next = backend.engine.random.getrandbits(64)
    straight_on = losses(backend)
    backend.load(tmp_path / "step")
    assert backend.engine.version == 2
    assert losses(backend) == straight_on
    backend.close()

    fresh = make_backend(tiny_model, learning_rate=1e-3, seed=99, **options)
    fresh.load(tmp_path / "step")
    assert fresh.engine.version == 2
    assert fresh.engine.random.getrandbits(64) == drawn_next
    assert losses(fresh) == straight_on
    fresh.close()


@pytest.mark.parametrize("options", OPTIONS)
def test_transformers_loads_a_checkpoint(tiny_model: Path, tmp_path: Path, options: dict) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    backend = make_backend(tiny_model, learning_rate=1e-2, **options)
    backend.update(make_batch())
    backend.update(make_batch())
    backend.save(tmp_path / "step")
    tokens = torch.arange(5, 30)[None]
    backend._model.causal.set_attn_implementation("sdpa")
    with torch.no_grad():
        ours = backend._model.causal(tokens).logits
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "step", dtype=getattr(torch, options["dtype"]))
        theirs = loaded.eval()(tokens).logits
    backend.close()
    assert torch.equal(ours.float(), theirs.float())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "step")
    assert "tool_call" in tokenizer.chat_template


def test_a_model_whose_defaults_of_sampling_lack_the_flag_that_they_imply_can_be_saved(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "tiny")
    file = folder / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "temperature": 0.9, "top_p": 0.6}))
    backend = make_backend(folder)
    backend.save(tmp_path / "step")
    backend.close()
    saved = json.loads((tmp_path / "step" / file.name).read_text())
    assert (saved["do_sample"], saved["temperature"], saved["top_p"]) == (True, 0.9, 0.6)


@pytest.mark.parametrize("options", OPTIONS)
def test_a_checkpoint_is_a_model_to_start_from(tiny_model: Path, tmp_path: Path, options: dict) -> None:
    backend = make_backend(tiny_model, learning_rate=1e-2, **options)
    backend.update(make_batch())
    backend.save(tmp_path / "step")
    expected = backend.update(make_batch())["loss"]
    backend.close()
    started = make_backend(tmp_path / "step", dtype=options["dtype"])
    assert started.update(make_batch())["loss"] == pytest.approx(expected, abs=1e-3)
    started.close()


def test_a_checkpoint_of_another_model_is_refused_and_named(tiny_model: Path, tmp_path: Path) -> None:
    other = make_tiny_model(tmp_path / "other", seed=1)
    backend = make_backend(other)
    backend.save(tmp_path / "step")
    backend.close()
    backend = make_backend(tiny_model)
    before = {name: value.clone() for name, value in backend._weights_of().masters.items()}
    with pytest.raises(ConfigError, match="other") as caught:
        backend.load(tmp_path / "step")
    assert str(tiny_model) in str(caught.value)
    assert all(torch.equal(before[name], value) for name, value in backend._weights_of().masters.items())
    backend.close()


def test_adapters_and_full_weights_are_not_mixed_up(tiny_model: Path, tmp_path: Path) -> None:
    adapters = make_backend(tiny_model, lora_rank=2)
    adapters.save(tmp_path / "adapters")
    full = make_backend(tiny_model)
    full.save(tmp_path / "full")
    for backend, folder in ((full, "adapters"), (adapters, "full")):
        with pytest.raises(ConfigError, match="LoRA"):
            backend.load(tmp_path / folder)
        backend.close()


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"lora_rank": 4}, "trained with lora_rank 2, this run has 4"),
        ({"lora_alpha": 64.0}, "trained with lora_alpha 4, this run has 64"),
        ({"lora_targets": ("q_proj",)}, "trained with lora_targets q_proj, v_proj, this run has q_proj"),
    ],
    ids=["rank", "alpha", "targets"],
)
@pytest.mark.parametrize("adapters", [(), ("writer", "checker")], ids=["one", "several"])
def test_another_lora_than_was_trained_is_refused(
    tiny_model: Path, tmp_path: Path, adapters: tuple[str, ...], other: dict, message: str
) -> None:
    """With another scale or other modules the same tensors are another policy."""
    lora = {"adapters": adapters, "lora_rank": 2, "lora_targets": ("v_proj", "q_proj")}
    first = make_backend(tiny_model, **lora)
    first.save(tmp_path / "step")
    first.close()
    with pytest.raises(ConfigError, match=message):
        make_backend(tiny_model, **{**lora, **other}).load(tmp_path / "step")
    with pytest.raises(ConfigError, match=message.split()[2]):
        make_backend(tmp_path / "step", **{**lora, **other})
    make_backend(tmp_path / "step", **lora).close()


def test_what_is_no_checkpoint_or_damaged_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    backend = make_backend(tiny_model)
    with pytest.raises(ConfigError, match="not a checkpoint"):
        backend.load(tiny_model)
    with pytest.raises(ConfigError, match="not a checkpoint"):
        backend.load(tmp_path / "nowhere")
    backend.save(tmp_path / "step")
    tensors = tmp_path / "step" / checkpoint.TENSORS
    tensors.write_bytes(tensors.read_bytes()[:1000])
    with pytest.raises(ConfigError, match=r"damaged.*Resume from an earlier checkpoint"):
        backend.load(tmp_path / "step")
    state = tmp_path / "step" / checkpoint.STATE
    state.write_text(json.dumps({"format": 99}))
    with pytest.raises(ConfigError, match="format 99"):
        backend.load(tmp_path / "step")
    state.write_text("{")
    with pytest.raises(ConfigError, match="can't be read"):
        backend.load(tmp_path / "step")
    backend.close()


def test_a_save_that_fails_leaves_the_old_checkpoint_and_nothing_half_written(
    tiny_model: Path, tmp_path: Path, monkeypatch
) -> None:
    backend = make_backend(tiny_model)
    backend.save(tmp_path / "step")
    backend.update(make_batch())

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_file", full)
        with pytest.raises(OSError, match="space"):
            backend.save(tmp_path / "step")
    assert [path.name for path in tmp_path.iterdir()] == ["step"]
    backend.load(tmp_path / "step")
    assert backend.engine.version == 0
    backend.update(make_batch())
    backend.save(tmp_path / "step")  # over the old one
    assert json.loads((tmp_path / "step" / checkpoint.STATE).read_text())["version"] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["step"]
    backend.close()
