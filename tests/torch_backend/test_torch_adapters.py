"""Several adapters over one frozen model: generated in one batch, trained apart, saved each on its own."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
load_file = pytest.importorskip("safetensors.torch").load_file
save_file = pytest.importorskip("safetensors.torch").save_file

from lightning_spans.errors import ConfigError
from lightning_trainer.backends.torch import TorchLearner
from lightning_trainer.backends.torch.learn import adapters
from lightning_trainer.gateway.engine import Engine, SampledPiece, Sampling
from lightning_trainer.rl.rows import Row
from support.models.updates import make_backend, make_batch

pytestmark = pytest.mark.torch

TWO = {"adapters": ("writer", "rewriter"), "lora_rank": 4, "learning_rate": 1e-2}
DTYPES = ["float32", "bfloat16"]


def rows_of(policy: str, seed: int = 0) -> list[Row]:
    return [replace(row, policy=policy, agent=policy) for row in make_batch(seed)]


def both(seed: int = 0) -> list[Row]:
    return [*rows_of("writer", seed), *rows_of("rewriter", seed + 10)]


@pytest.fixture(params=DTYPES)
def backend(request: pytest.FixtureRequest, tiny_model: Path) -> Iterator[TorchLearner]:
    made = make_backend(tiny_model, dtype=request.param, **TWO)
    yield made
    made.close()


def hashes(backend: TorchLearner) -> dict[str, str]:
    """Of every parameter, by name."""
    return {
        name: hashlib.sha256(parameter.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, parameter in backend._model.causal.named_parameters()
    }


def changed(before: dict[str, str], after: dict[str, str]) -> set[str]:
    assert before.keys() == after.keys()
    return {name for name in before if before[name] != after[name]}


async def drawn(engine: Engine, prompt: Sequence[int], seed: int, tokens: int = 12) -> list[SampledPiece]:
    return [piece async for piece in engine.generate(prompt, Sampling(max_tokens=tokens, seed=seed, temperature=0.9))]


def tokens_of(pieces: Sequence[SampledPiece]) -> list[int]:
    return [token for piece in pieces for token in piece.token_ids]


def engine_of(backend: TorchLearner, name: str) -> Engine:
    return next(engine for engine in backend.engines if engine.model == name)


def test_only_the_adapter_whose_rows_are_trained_changes_and_nothing_else_by_a_bit(backend: TorchLearner) -> None:
    backend.update(both())
    before = hashes(backend)
    metrics = backend.update(rows_of("writer", 1))
    moved = changed(before, hashes(backend))
    assert moved
    assert all(".writer." in name for name in moved)
    assert (engine_of(backend, "writer").version, engine_of(backend, "rewriter").version) == (2, 1)
    assert "loss/writer" in metrics
    assert "loss/rewriter" not in metrics


def test_adapter_without_a_gradient_does_not_move_by_momentum(backend: TorchLearner) -> None:
    backend.update(both())
    before = hashes(backend)
    flat = [replace(row, advantages=row.advantages * 0) for row in rows_of("rewriter", 2)]
    backend.update([*rows_of("writer", 2), *flat])
    assert all(".writer." in name for name in changed(before, hashes(backend)))
    assert engine_of(backend, "rewriter").version == 1


def test_training_both_is_training_each_alone(tiny_model: Path) -> None:
    """Groups, weights of tokens, clipping of the gradient and moments are each policy's own."""
    together = make_backend(tiny_model, dtype="float32", **TWO)
    for seed in range(3):
        together.update(both(seed))
    for name, offset in (("writer", 0), ("rewriter", 10)):
        alone = make_backend(tiny_model, dtype="float32", **{**TWO, "adapters": (name,)})
        for seed in range(3):
            alone.update(rows_of(name, seed + offset))
        for key, master in alone._weights_of(name).masters.items():
            assert torch.equal(master, together._weights_of(name).masters[key]), key
        alone.close()
    together.close()


def test_the_base_answers_as_the_model_without_adapters(backend: TorchLearner, tiny_model: Path) -> None:
    for seed in range(3):
        backend.update(both(seed))
    plain = make_backend(tiny_model, dtype=backend.options.dtype)
    prompt = list(range(5, 40))
    ours = asyncio.run(drawn(backend.engine, prompt, 3))
    theirs = asyncio.run(drawn(plain.engine, prompt, 3))
    plain.close()
    assert tokens_of(ours) == tokens_of(theirs)
    assert backend.engine.model == "base"


def test_adapters_in_one_batch_answer_as_each_alone(tiny_model: Path) -> None:
    backend = make_backend(tiny_model, dtype="float32", **TWO)
    for seed in range(3):
        backend.update(both(seed))
    prompts = [list(range(5, 45)), list(range(5, 40)), list(range(60, 80))]
    asks = [(engine, prompt, seed) for engine in backend.engines for prompt in prompts for seed in (1, 2)]

    async def together() -> list[list[SampledPiece]]:
        return await asyncio.gather(*(drawn(*ask) for ask in asks))

    batched = asyncio.run(together())
    for ask, pieces in zip(asks, batched, strict=True):
        backend.engine.weights_changed(backend.engine.version)  # forgets what it holds
        alone = asyncio.run(drawn(*ask))
        assert tokens_of(alone) == tokens_of(pieces)
        gaps = [abs(a.logprobs[0] - b.logprobs[0]) for a, b in zip(alone, pieces, strict=True)]
        assert max(gaps) < 1e-4
    answers = {engine.model: tokens_of(batched[2 * 3 * n]) for n, engine in enumerate(backend.engines)}
    assert len({tuple(answer) for answer in answers.values()}) == 3  # they do differ
    backend.close()


def test_engine_and_update_agree_on_the_log_probabilities_of_each_adapter(backend: TorchLearner) -> None:
    for seed in range(3):
        backend.update(both(seed))
    prompt = list(range(5, 40))
    for name in ("writer", "rewriter"):
        pieces = asyncio.run(drawn(engine_of(backend, name), prompt, 7))
        row = rows_of(name)[0]
        ids, logprobs = tokens_of(pieces), [value for piece in pieces for value in piece.logprobs]
        sequence = [*prompt, *ids]
        mask = torch.zeros(len(sequence), dtype=torch.bool).numpy()
        mask[len(prompt) :] = True
        recorded = mask.astype("f4")
        recorded[mask] = logprobs
        measured = replace(
            row,
            tokens=torch.tensor(sequence, dtype=torch.int32).numpy(),
            mask=mask,
            logprobs=recorded,
            advantages=mask.astype("f8"),
            lengths=(len(ids),),
            temperature=0.9,
        )
        gap = backend.update([measured])["logprob_gap"]
        assert gap < (1e-4 if backend.options.dtype == "float32" else 0.05)


def test_each_adapter_is_a_folder_that_peft_loads(backend: TorchLearner, tiny_model: Path, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    for seed in range(2):
        backend.update(both(seed))
    backend.save(tmp_path / "step")
    tokens = torch.arange(5, 30)[None]
    dtype = getattr(torch, backend.options.dtype)
    for name in ("writer", "rewriter"):
        base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=dtype)
        loaded = PeftModel.from_pretrained(base, str(tmp_path / "step" / name), autocast_adapter_dtype=False).eval()
        assert json.loads((tmp_path / "step" / name / "adapter_config.json").read_text())["r"] == 4
        with torch.no_grad():
            backend._model.causal.set_adapter(name)
            backend._model.causal.set_attn_implementation("sdpa")
            ours, theirs = backend._model.causal(tokens).logits, loaded(tokens).logits
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_resume_is_exact_to_the_bit(tiny_model: Path, tmp_path: Path, dtype: str) -> None:
    def losses(backend: TorchLearner) -> list[tuple[float, ...]]:
        found = [backend.update(both(seed)) for seed in (2, 3)]
        return [tuple(m[f"{n}/{a}"] for n in ("loss", "grad_norm") for a in TWO["adapters"]) for m in found]

    backend = make_backend(tiny_model, dtype=dtype, **TWO)
    backend.update(both(0))
    backend.update(rows_of("writer", 1))
    backend.save(tmp_path / "step")
    straight_on, ends = losses(backend), hashes(backend)
    backend.close()
    fresh = make_backend(tiny_model, dtype=dtype, seed=99, **TWO)
    fresh.load(tmp_path / "step")
    assert {engine.model: engine.version for engine in fresh.engines} == {"base": 0, "writer": 2, "rewriter": 1}
    assert losses(fresh) == straight_on
    assert changed(ends, hashes(fresh)) == set()
    fresh.close()


def test_checkpoint_is_served_with_all_its_adapters(backend: TorchLearner, tmp_path: Path) -> None:
    for seed in range(3):
        backend.update(both(seed))
    backend.save(tmp_path / "step")
    served = TorchLearner(tmp_path / "step", threads=1, dtype=backend.options.dtype)
    prompt = list(range(5, 40))
    for ours, theirs in zip(backend.engines, served.engines, strict=True):
        assert ours.model == theirs.model
        assert tokens_of(asyncio.run(drawn(ours, prompt, 5))) == tokens_of(asyncio.run(drawn(theirs, prompt, 5)))
    assert "tool_call" in served.engine.tokenizer.chat_template
    served.close()
    one = TorchLearner(tmp_path / "step" / "writer", threads=1, dtype=backend.options.dtype)
    expected = tokens_of(asyncio.run(drawn(engine_of(backend, "writer"), prompt, 5)))
    if backend.options.dtype == "float32":  # in bfloat16 one adapter is added into the weights, which rounds otherwise
        assert tokens_of(asyncio.run(drawn(one.engine, prompt, 5))) == expected
    one.close()


def test_loading_several_is_no_alarm_and_a_lacking_weight_is_one(
    backend: TorchLearner, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    backend.save(tmp_path / "step")
    reports = logging.getLogger("transformers")
    reports.addHandler(caplog.handler)
    try:
        TorchLearner(tmp_path / "step", threads=1, dtype=backend.options.dtype).close()
    finally:
        reports.removeHandler(caplog.handler)
    assert "MISSING" not in caplog.text  # transformers says so of the first adapter when the second is read
    weights = tmp_path / "step" / "rewriter" / "adapter_model.safetensors"
    tensors = load_file(weights)
    tensors.pop(next(iter(tensors)))
    save_file(tensors, weights)
    with pytest.raises(ConfigError, match="1 weights are missing in it, and the model does not have 0 others"):
        TorchLearner(tmp_path / "step", threads=1, dtype=backend.options.dtype)


@pytest.mark.parametrize("name", ["mlp", "layers", "0", "weight", "lora_A", "base_layer"])
def test_an_adapter_named_as_a_part_of_the_model_is_refused_before_it_is_trained(tiny_model: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"can't be named '{name}'.*AGENT=lora:NAME"):
        make_backend(tiny_model, adapters=("writer", name), lora_rank=4)


def test_fixed_adapter_is_kept_and_served_bit_for_bit(backend: TorchLearner, tmp_path: Path) -> None:
    for seed in range(2):
        backend.update(both(seed))
    backend.save(tmp_path / "first")
    options = {**TWO, "fixed": ("rewriter",), "dtype": backend.options.dtype}
    again = make_backend(tmp_path / "first", **options)
    before = hashes(again)
    again.update(rows_of("writer", 5))
    moved = changed(before, hashes(again))
    assert moved
    assert all(".writer." in name for name in moved)
    again.save(tmp_path / "second")
    for name, same in (("rewriter", True), ("writer", False)):
        files = [tmp_path / step / name / "adapter_model.safetensors" for step in ("first", "second")]
        assert (files[0].read_bytes() == files[1].read_bytes()) is same
    with pytest.raises(ValueError, match="answered by 'rewriter', not by writer"):
        again.update(rows_of("rewriter"))
    again.close()
    with pytest.raises(ConfigError, match=r"no adapter editor in .* to keep"):
        make_backend(tmp_path / "first", **{**options, "adapters": ("writer", "editor"), "fixed": ("editor",)})


def test_what_does_not_fit_is_refused(backend: TorchLearner, tiny_model: Path, tmp_path: Path) -> None:
    backend.save(tmp_path / "step")
    other = make_backend(tiny_model, dtype=backend.options.dtype, **{**TWO, "adapters": ("writer", "editor")})
    with pytest.raises(ConfigError, match="trained the adapters rewriter, writer, this run trains the adapters editor"):
        other.load(tmp_path / "step")
    other.close()
    with pytest.raises(ConfigError, match="adapters need lora_rank"):
        make_backend(tiny_model, adapters=("writer",))
    with pytest.raises(ConfigError, match="rank 4"):
        make_backend(tmp_path / "step", adapters=("writer",), lora_rank=8)
    with pytest.raises(ConfigError, match="Use the base"):
        make_backend(tmp_path / "step" / "writer", adapters=("writer",), lora_rank=4)
    with pytest.raises(ValueError, match="answered by 'editor'"):
        backend.update(rows_of("editor"))


def test_a_new_adapter_gets_scale_and_modules_of_those_that_are_there(tiny_model: Path, tmp_path: Path) -> None:
    first = make_backend(tiny_model, **{**TWO, "lora_alpha": 3.0, "lora_targets": ("q_proj", "o_proj")})
    first.save(tmp_path / "step")
    first.close()
    more = make_backend(tmp_path / "step", **{**TWO, "adapters": ("editor", "writer")})
    assert adapters.shape_of(more._model, "editor") == adapters.shape_of(more._model, "writer")
    assert adapters.shape_of(more._model, "editor") == (4, 3.0, ("o_proj", "q_proj"))
    assert tokens_of(asyncio.run(drawn(engine_of(more, "editor"), [5, 6, 7], seed=0)))
    more.close()


def test_divergence_from_the_start_is_measured_for_each_adapter(tiny_model: Path) -> None:
    backend = make_backend(tiny_model, dtype="float32", **{**TWO, "kl_coef": 0.1})
    first = backend.update(both(0))
    for seed in (1, 2):
        last = backend.update(both(seed))
    assert first["kl/writer"] == pytest.approx(0.0, abs=1e-6)
    assert last["kl/writer"] > 1e-6
    assert last["kl/rewriter"] > 1e-6
    backend.close()
