"""What a user with one GPU is told before anything is loaded. The GPU is simulated: a program named nvidia-smi."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from types import SimpleNamespace

import pytest

from lightning_spans.errors import ConfigError
from lightning_trainer import TrainConfig
from lightning_trainer.backends.torch.fit import plan_run
from lightning_trainer.backends.torch.sampler import engine_name
from lightning_trainer.engines.devices import plan_for
from lightning_trainer.models.bases import NEEDED, NumberFormat, write_format
from lightning_trainer.models.shape import read_shape
from lightning_trainer.report.progress import Silent
from lightning_trainer.run import embedded

SIZES = {  # hidden, inner, layers, heads, key heads, vocabulary, tied: Qwen2.5's
    "0.5B": (896, 4864, 24, 14, 2, 151_936, True),
    "1.5B": (1536, 8960, 28, 12, 2, 151_936, True),
    "3B": (2048, 11_008, 36, 16, 2, 151_936, True),
    "7B": (3584, 18_944, 28, 28, 4, 152_064, False),
}


def make_model(folder: Path, size: str) -> Path:
    """Write a model folder with a file of weights that is as long as it should be, and empty."""
    hidden, inner, layers, heads, key_heads, vocabulary, tied = SIZES[size]
    values = {
        "model_type": "qwen2",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 32_768,
        "dtype": "bfloat16",
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    (folder / "tokenizer.json").write_text("{}")
    header = json.dumps({"all": {"dtype": "BF16", "shape": [1], "data_offsets": [0, 2]}}).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header + b"\0\0")
    return folder


@pytest.fixture
def gpu(tmp_path, monkeypatch):
    """Simulate one GPU of so many MiB."""

    def install(*mib: int) -> None:
        program = tmp_path / "bin" / "nvidia-smi"
        program.parent.mkdir(exist_ok=True)
        program.write_text("#!/bin/sh\n" + "".join(f"echo {each}\n" for each in mib))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")

    return install


def plan(folder: Path, size: str, **options):
    model = folder / size
    if not model.exists():
        make_model(model, size)
    return plan_run(plan_options(folder, model, **options))


def plan_options(folder: Path, model: Path, **options) -> TrainConfig:
    tasks = folder / "tasks.jsonl"
    tasks.write_text('{"q": 1}\n')
    given = {"target": "a:run", "data": str(tasks), "model": str(model), "engine": "embedded", "steps": 1}
    return TrainConfig(**{**given, **options})


FITS_24 = {  # with 24 GB, defaults otherwise
    ("0.5B", "embedded", 0): True,
    ("0.5B", "embedded", 16): True,
    ("0.5B", "vllm", 16): True,
    ("1.5B", "embedded", 0): False,
    ("1.5B", "embedded", 16): True,
    ("1.5B", "vllm", 16): True,
    ("3B", "embedded", 0): False,
    ("3B", "embedded", 16): True,
    ("3B", "vllm", 16): True,
    ("7B", "embedded", 0): False,
    ("7B", "embedded", 16): True,  # with shorter answers
    ("7B", "vllm", 16): False,
}


@pytest.mark.parametrize(("case", "fits"), FITS_24.items())
def test_what_fits_on_24_gb_and_what_does_not(tmp_path, gpu, case, fits):
    gpu(24_564)
    size, engine, rank = case
    found = plan(tmp_path, size, engine=engine, lora_rank=rank)
    text = "\n".join(found.lines)
    assert found.fits is fits, text
    assert "learner: " in text
    if not fits:
        assert re.search(r"[\d.]+ GiB are missing", text)
        changes = [line.strip() for line in found.lines if line.startswith("  --")]
        assert changes or "use a larger GPU" in text


def test_each_change_that_is_named_fits_when_it_is_made(tmp_path, gpu):
    gpu(24_564)
    found = plan(tmp_path, "7B", lora_rank=16)
    assert "only if its answers are shorter than assumed" in found.lines[0]
    named = [line.strip().partition(":")[0] for line in found.lines if line.startswith("  --")]
    assert any("--base-bits" in each for each in named), found.lines
    for words in named:
        changes: dict = {"lora_rank": 16}
        for flag, value in re.findall(r"--([\w-]+) (\S+)", words):
            name = flag.replace("-", "_")
            if name == "backend_options":
                option, _, number = value.partition("=")
                changes.setdefault(name, {})[option] = int(number)
            else:
                changes[name] = int(value) if value.isdigit() else value
        changed = plan(tmp_path, "7B", **changes)
        assert changed.fits, words
        assert "missing" not in "".join(changed.lines), words


def test_7b_fits_next_to_vllm_on_24_gb_only_if_vllm_rounds_too(tmp_path, gpu):
    gpu(24_564)
    given = {"engine": "vllm", "lora_rank": 16}
    words = "--base-bits 4 --engine-options quantization=bitsandbytes"
    assert any(words in line for line in plan(tmp_path, "7B", **given).lines)
    assert not plan(tmp_path, "7B", **given, base_bits=4).fits
    found = plan(tmp_path, "7B", **given, base_bits=4, engine_options={"quantization": "bitsandbytes"})
    assert found.fits
    assert "sleeps" not in found.lines[-1]


@pytest.mark.parametrize(
    ("experts", "dense"),
    [
        ({"num_local_experts": 8}, False),  # Mixtral
        ({"n_routed_experts": 64}, False),  # DeepSeek
        ({"num_experts": 128}, False),  # Qwen3
        ({"num_local_experts": 0}, True),  # a hybrid Granite without experts
    ],
)
def test_a_mixture_of_experts_is_not_counted_as_dense(tmp_path, experts, dense):
    model = make_model(tmp_path / "model", "0.5B")
    (model / "config.json").write_text(json.dumps({**json.loads((model / "config.json").read_text()), **experts}))
    assert (read_shape(str(model)) is not None) is dense


def test_a_sum_is_the_sum_of_its_parts(tmp_path, gpu):
    gpu(81_559)
    line = next(line for line in plan(tmp_path, "7B", lora_rank=16).lines if line.startswith("learner"))
    whole, *parts = (float(number) for number in re.findall(r"([\d.]+) GiB", line))
    assert whole == pytest.approx(sum(parts), abs=0.4)  # of numbers with one digit


def test_no_gpu_no_plan(tmp_path, gpu):
    gpu()
    assert plan(tmp_path, "0.5B") == ((), True)


def test_a_gpu_of_its_own_is_not_shared(tmp_path, gpu):
    gpu(24_564, 24_564)
    beside = plan(tmp_path, "3B", engine="vllm", lora_rank=16, engine_gpus="1")
    same = plan(tmp_path, "3B", engine="vllm", lora_rank=16, engine_gpus="0")
    assert beside.fits
    assert "learner 0.0 GiB" in beside.lines[-1]
    assert "learner 0.0 GiB" not in same.lines[-1]


@pytest.mark.parametrize("fits", [True, False])
def test_a_dry_run_shows_the_plan_before_it_loads_anything(tmp_path, monkeypatch, fits):
    events = []
    monkeypatch.setattr(embedded, "probe", lambda *_, **__: events.append("loaded") or 1 / 0)
    monkeypatch.setattr(Silent, "note", lambda _, text: events.append(text))
    (tmp_path / "tasks.jsonl").write_text('{"q": 1}\n')
    config = TrainConfig(target="a:run", data=str(tmp_path / "tasks.jsonl"), model="m", steps=1)
    backend = embedded.EmbeddedBackend(lambda _: 1 / 0, lambda _: None, plan=lambda _: (("the plan",), fits))
    if fits:
        with pytest.raises(ZeroDivisionError):
            backend.describe(config, Silent())
        assert events == ["the plan", "loaded"]
    else:
        described = backend.describe(config, Silent())
        assert (described.text, described.facts["fits"], events) == ("the plan", False, [])


def test_a_run_that_can_not_fit_is_refused_before_its_model_is_loaded(tmp_path, gpu, monkeypatch):
    from lightning_trainer.backends.torch import backend

    gpu(24_564)
    monkeypatch.setattr(backend, "has_cuda", lambda device: True)
    make_model(tmp_path / "m", "7B")
    (tmp_path / "tasks.jsonl").write_text('{"q": 1}\n')
    config = TrainConfig(target="a:run", data=str(tmp_path / "tasks.jsonl"), model=str(tmp_path / "m"), steps=1)
    with pytest.raises(ConfigError, match=r"does not hold the learner: .* GiB are missing"):
        backend._open(config)


@pytest.mark.parametrize(
    ("size", "options", "fits"),
    [
        ("1.5B", (), (False, True, True)),
        ("1.5B", ("--policy", "writer=lora,rewriter=lora"), (True, True, True)),
        ("7B", ("--lora-rank", "16", "--engine", "vllm"), (False, True, True)),
        ("7B", ("--lora-rank", "16", "--base-bits", "4"), (True, True, True)),
    ],
)
def test_a_run_is_planned_for_a_gpu_that_is_not_here(tmp_path, monkeypatch, size, options, fits):
    from click.testing import CliRunner

    from lightning_trainer.cli import cli

    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=0))  # this machine is not the run's
    model = make_model(tmp_path / size, size)
    (model / "model.safetensors").unlink()  # the shape is enough
    (tmp_path / "tasks.jsonl").write_text('{"q": 1}\n')
    given = ["train", "no_module:run", "--data", str(tmp_path / "tasks.jsonl"), "--model", str(model), *options]
    for card, expected in zip((24, 48, 80), fits, strict=True):
        done = CliRunner().invoke(cli, [*given, "--dry-run", "--gpu-memory", str(card), "--json"])
        assert done.exit_code == 0, done.output
        facts = json.loads(done.output.splitlines()[-1])
        assert facts["fits"] is expected, done.output
        assert f"{card}.0 GiB" in done.output
        if expected:
            assert f"one GPU of {card}.0 GiB holds this run." in done.output
        else:
            assert re.search(r"[\d.]+ GiB are missing", done.output)
            assert "  --" in done.output
    assert "Add --dry-run" in CliRunner().invoke(cli, [*given, "--gpu-memory", "24"]).output


@pytest.mark.parametrize("bits", [None, 4])
def test_what_a_checkpoint_fixes_is_not_proposed(tmp_path, bits):
    """Adapters of rank 32 were trained over a model that is too large; rank and bits are theirs."""
    checkpoint, base = tmp_path / "run", make_model(tmp_path / "7B", "7B")
    checkpoint.mkdir()
    (checkpoint / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base), "r": 32}))
    write_format(checkpoint / NEEDED, NumberFormat(bits, "bfloat16"))
    with plan_for(24, 1):
        found = plan_run(plan_options(tmp_path, checkpoint, engine="vllm"))
        resumed = plan(tmp_path, "7B", lora_rank=32, resume=tmp_path)
    assert not found.fits
    proposed = "\n".join(line for line in found.lines if line.startswith("  --"))
    assert "--lora-rank" not in proposed
    assert "--base-bits" not in proposed
    assert ("--engine-options quantization=bitsandbytes" in proposed) is (bits == 4)
    assert f"start from its model: --model {base}" in found.lines[-1]
    assert not any(word in line for line in resumed.lines for word in ("  --lora-rank", "  --base-bits"))
    assert any("other ones need a new run" in line for line in resumed.lines)


def test_adapters_of_a_checkpoint_are_sampled_as_new_ones_are(tmp_path, monkeypatch):
    monkeypatch.setattr("lightning_trainer.backends.torch.sampler.is_installed", lambda: True)
    checkpoint, base = tmp_path / "run", make_model(tmp_path / "0.5B", "0.5B")
    checkpoint.mkdir()
    (checkpoint / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base), "r": 8}))
    with plan_for(80, 1):
        assert engine_name(plan_options(tmp_path, checkpoint, engine=None)) == "vllm"
        assert engine_name(plan_options(tmp_path, base, engine=None)) == "embedded"
