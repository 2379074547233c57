"""Longrope positions (Phi-3, Phi-4, PhiMoE): one set of frequencies for all sequences, by `max_model_len`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Final

import pytest

torch = pytest.importorskip("torch")

from lightning_trainer.backends.torch import TorchLearner
from support.models.as_transformers import COMMON, drawn, plain, plain_logprobs, row_of
from support.models.tiny import make_tiny_model

pytestmark = pytest.mark.torch

_SHORT_LENGTH: Final = 128
_FACTORS: Final = {"short": [1.0] * 8, "long": [1.0, 1.5, 2.0, 4.0, 8.0, 16.0, 24.0, 32.0]}
_OWN: Final[dict[str, dict[str, Any]]] = {
    "Phi3": {},
    "Phimoe": {"num_local_experts": 2, "num_experts_per_tok": 2},
}


def make_model(folder: Path, name: str, short: str, long: str) -> Path:
    """Write a model with these factors for short sequences and for long ones."""
    import transformers

    positions = {
        "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": _SHORT_LENGTH,
        "short_factor": _FACTORS[short], "long_factor": _FACTORS[long], "factor": 8.0,
        **({"short_mscale": 1.2, "long_mscale": 1.2} if name == "Phimoe" else {}),
    }  # fmt: skip
    given = {key: value for key, value in COMMON.items() if key != "head_dim"}
    make_tiny_model(folder)
    config = getattr(transformers, f"{name}Config")(
        **given, **_OWN[name], rope_parameters=positions, original_max_position_embeddings=_SHORT_LENGTH
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        getattr(transformers, f"{name}ForCausalLM")(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", _OWN)
@pytest.mark.parametrize(("longest", "factors"), [(None, "short"), (_SHORT_LENGTH + 1, "long"), (512, "long")])
def test_all_sequences_have_the_same_frequencies(tmp_path: Path, name: str, longest: int | None, factors: str) -> None:
    model = make_model(tmp_path / "model", name, "short", "long")
    learner = TorchLearner(model, threads=1, dtype="float32", micro_batch_tokens=2048, max_model_len=longest)
    assert learner.engine.max_model_len == (longest or _SHORT_LENGTH)
    lengths = (20, 60, 100) if longest != 512 else (20, 110, 300)  # one is short, one crosses the limit, one is long
    prompts = [[3 + (n * 7 + i * (n + 3)) % 250 for i in range(length)] for n, length in enumerate(lengths)]

    async def converse() -> list[Any]:
        first = await drawn(learner.engine, prompts[0], max_tokens=28, seed=1)
        others = await asyncio.gather(*(drawn(learner.engine, each, max_tokens=28, seed=1) for each in prompts[1:]))
        return [first, *others]

    oracle = plain(make_model(tmp_path / "oracle", name, factors, factors))
    answers = asyncio.run(converse())
    for prompt, (tokens, logprobs) in zip(prompts, answers, strict=True):
        assert logprobs == pytest.approx(plain_logprobs(oracle, prompt, tokens), abs=2e-4)
    rows = [row_of(prompt, *answer, advantage=1.0) for prompt, answer in zip(prompts, answers, strict=True)]
    for row, computed in zip(rows, learner.logprobs(rows), strict=True):
        assert computed == pytest.approx(row.logprobs[row.mask], abs=2e-4)
    learner.close()
