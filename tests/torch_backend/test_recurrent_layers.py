"""Layers that remember (Qwen3.5, LFM2, Granite 4 and others): as transformers' own forward pass, to rounding."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

torch = pytest.importorskip("torch")

from lightning_spans.errors import ConfigError
from lightning_trainer.backends.torch import TorchLearner
from lightning_trainer.backends.torch.model.recurrent import Memory
from lightning_trainer.rl.rows import Row
from support.models.as_transformers import COMMON, check_engine_and_update, check_gradients, drawn, prompts_of, row_of
from support.models.tiny import make_tiny_model

pytestmark = pytest.mark.torch

_LAYERS: Final = ["linear_attention", "full_attention", "linear_attention"]
_DELTA: Final = {
    "layer_types": _LAYERS, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}  # fmt: skip
_MAMBA: Final = {
    "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_expand": 2, "mamba_d_state": 8, "mamba_n_groups": 2,
    "mamba_chunk_size": 16,
}  # fmt: skip
MODELS: Final[dict[str, dict[str, Any]]] = {
    "Qwen3_5": _DELTA,
    "Qwen3Next": {**_DELTA, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
                  "shared_expert_intermediate_size": 32},
    "OlmoHybrid": _DELTA,
    "Lfm2": {"layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False},
    "GraniteMoeHybrid": {**_MAMBA, "layer_types": _LAYERS, "num_local_experts": 0, "shared_intermediate_size": 96},
    "FalconH1": {**_MAMBA, "mamba_d_ssm": 128},
}  # fmt: skip


def make_model(folder: Path, name: str, *, seed: int = 0) -> Path:
    import transformers

    make_tiny_model(folder)
    config = getattr(transformers, f"{name}TextConfig" if name == "Qwen3_5" else f"{name}Config")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = getattr(transformers, f"{name}ForCausalLM")(config(**{**COMMON, **MODELS[name]}))
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", MODELS)
def test_engine_and_update_agree_with_transformers(tmp_path: Path, name: str) -> None:
    counts = check_engine_and_update(make_model(tmp_path / "model", name), 0, gap=1e-3)
    assert counts["reused_tokens"] > 500


@pytest.mark.parametrize(("name", "again"), [*((name, "off") for name in MODELS), (next(iter(MODELS)), "on")])
def test_gradients_are_those_of_rows_forwarded_one_by_one(tmp_path: Path, name: str, again: str) -> None:
    check_gradients(make_model(tmp_path / "model", name), activation_checkpointing=again)


def test_each_token_of_a_batch_goes_through_its_own_adapter(tmp_path: Path) -> None:
    """Though a recurrent layer gets the tokens of some slots at a time."""
    two = {"adapters": ("writer", "critic"), "lora_rank": 4, "learning_rate": 3e-2}
    learner = TorchLearner(make_model(tmp_path / "model", "Qwen3_5"), threads=1, dtype="float32", slots=5, **two)
    names, prompts = ("writer", "critic"), prompts_of(0)[:4]

    async def ask() -> list[Row]:
        engines = {engine.model: engine for engine in learner.engines}
        asked = [(name, prompt) for prompt in prompts for name in names]
        drawing = (drawn(engines[name], prompt, max_tokens=9, seed=n) for n, (name, prompt) in enumerate(asked))
        found = zip(asked, await asyncio.gather(*drawing), strict=True)
        rows = [
            (name, row_of(prompt, *answer, advantage=(-1.0) ** n)) for n, ((name, prompt), answer) in enumerate(found)
        ]
        return [replace(row, policy=name, agent=name) for name, row in rows]

    learner.update(asyncio.run(ask()))
    rows = asyncio.run(ask())
    for row, computed in zip(rows, learner.logprobs(rows), strict=True):
        assert computed == pytest.approx(row.logprobs[row.mask], abs=1e-3)
    learner.close()


def test_rollouts_of_a_group_read_their_prompt_once(tmp_path: Path) -> None:
    learner = TorchLearner(make_model(tmp_path / "model", "Lfm2"), threads=1, dtype="float32", slots=4)
    prompt = prompts_of(0)[4]

    async def ask(*prompts: list[int]) -> list[list[int]]:
        found = await asyncio.gather(*(drawn(learner.engine, p, max_tokens=8, seed=n) for n, p in enumerate(prompts)))
        return [[*p, *answer] for p, (answer, _) in zip(prompts, found, strict=True)]

    said = asyncio.run(ask(*[prompt] * 4))
    assert learner.engine.counts()["reused_tokens"] == 3 * (len(prompt) - 1)
    before = learner.engine.counts()["reused_tokens"]
    asyncio.run(ask([*said[0], 5, 6, 7]))  # goes on from where the first has ended
    assert learner.engine.counts()["reused_tokens"] - before == len(said[0]) - 1
    learner.close()


def test_a_prompt_that_another_request_left_whole_is_read_once(tmp_path: Path) -> None:
    """What it would be remembered by is there before its last token is read."""
    learner = TorchLearner(make_model(tmp_path / "model", "Lfm2"), threads=1, dtype="float32", slots=4)
    prompt = prompts_of(0)[4]

    async def ask(prompt: list[int]) -> list[int]:
        return [*prompt, *(await drawn(learner.engine, prompt, max_tokens=8, seed=1))[0]]

    said = asyncio.run(ask(prompt))
    for _ in range(2):
        before = learner.engine.counts()["reused_tokens"]
        asyncio.run(ask(said))
        assert learner.engine.counts()["reused_tokens"] - before == len(said) - 1
    learner.close()


def test_a_transformers_whose_layers_ask_in_another_form_is_told(tmp_path: Path, monkeypatch) -> None:
    def older(self, conv_states, layer_idx):
        raise TypeError("update_conv_state() has no conv_kernel_size")

    monkeypatch.setattr(Memory, "update_conv_state", older)
    with pytest.raises(
        ConfigError, match=r"lfm2\): its recurrent layers have an unsupported form \(with transformers 5"
    ):
        TorchLearner(make_model(tmp_path / "model", "Lfm2"), threads=1, dtype="float32")
