"""Layers that see a window, attention sinks and capped scores: as transformers' own forward pass, to rounding.

Windows are shorter than the shortest shared prefix, so that sequences leave them in tails, prefixes and trunks.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Final

import pytest

torch = pytest.importorskip("torch")

from lightning_spans.errors import ConfigError
from lightning_trainer.backends.torch import TorchLearner
from lightning_trainer.backends.torch.model import step
from support.models.as_transformers import (
    COMMON,
    check_engine_and_update,
    check_gradients,
    drawn,
    plain_logprobs,
    prompts_of,
    row_of,
)
from support.models.tiny import make_tiny_model

pytestmark = pytest.mark.torch

_LAYERS: Final = ["sliding_attention", "full_attention", "sliding_attention"]
MODELS: Final[dict[str, dict[str, Any]]] = {
    "Mistral": {"sliding_window": 20},
    "Qwen2": {"sliding_window": 20, "use_sliding_window": True, "layer_types": _LAYERS},
    "Gemma2": {"sliding_window": 20, "layer_types": _LAYERS, "query_pre_attn_scalar": 16,
               "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0},
    "Gemma3": {"sliding_window": 20, "layer_types": _LAYERS, "query_pre_attn_scalar": 24},
    "Gemma4": {"sliding_window": 20, "layer_types": [*_LAYERS, "full_attention"], "num_hidden_layers": 4,
               "global_head_dim": 32, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 259,
               "num_kv_shared_layers": 1, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "GptOss": {"sliding_window": 20, "layer_types": _LAYERS, "num_local_experts": 4, "num_experts_per_tok": 2},
}  # fmt: skip


def make_model(folder: Path, name: str, *, seed: int = 0, **settings: Any) -> Path:
    import transformers

    make_tiny_model(folder)
    config = getattr(transformers, f"{name}TextConfig" if name in {"Gemma3", "Gemma4"} else f"{name}Config")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = getattr(transformers, f"{name}ForCausalLM")(config(**{**COMMON, **MODELS[name], **settings}))
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("sinks"):
                parameter.data.normal_(std=2)  # as strong as scores
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", MODELS)
def test_engine_and_update_agree_with_transformers(tmp_path: Path, name: str, seed: int) -> None:
    counts = check_engine_and_update(make_model(tmp_path / "model", name, seed=seed), seed)
    assert counts["reused_tokens"] > 500


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_rows_forwarded_one_by_one(tmp_path: Path, name: str) -> None:
    ours = check_gradients(make_model(tmp_path / "model", name))
    if name == "GptOss":
        assert float(ours["model.layers.0.self_attn.sinks"].abs().max()) > 1e-4


def test_a_window_that_is_not_kept_is_found_when_the_model_is_loaded(tmp_path: Path, monkeypatch) -> None:
    """Though it is longer than what is tried then."""
    folder = make_model(tmp_path / "model", "Mistral", sliding_window=500)
    unlimited = step.hidden_own
    monkeypatch.setattr(step, "hidden_own", lambda seen_RQ, length, _window: unlimited(seen_RQ, length, None))
    with pytest.raises(ConfigError, match=r"mistral\): its logits differ"):
        TorchLearner(folder, threads=1, dtype="float32")


def test_gemma_3_with_a_part_for_images_is_run_on_text(tmp_path: Path) -> None:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    folder = make_tiny_model(tmp_path / "model")
    vision = {
        "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
        "patch_size": 14,
    }  # fmt: skip
    text = {**COMMON, **MODELS["Gemma3"]}
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=258)
    model = Gemma3ForConditionalGeneration(config).eval()
    model.save_pretrained(folder)
    learner = TorchLearner(folder, threads=1, dtype="float32")
    prompt = [token for token in prompts_of(0)[2] if token < 258]
    tokens, logprobs = asyncio.run(drawn(learner.engine, prompt, max_tokens=40, seed=1, logit_bias={258: -100.0}))
    assert logprobs == pytest.approx(plain_logprobs(model, prompt, tokens), abs=2e-4)
    row = row_of(prompt, tokens, logprobs, 1.0)
    (computed,) = learner.logprobs([row])
    assert computed == pytest.approx(row.logprobs[row.mask], abs=2e-4)
    learner.close()


def test_layers_of_a_kind_that_is_not_known_are_refused_by_name(tmp_path: Path) -> None:
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    folder = make_tiny_model(tmp_path / "model")
    layers = {"layer_types": ["chunked_attention", "full_attention", "chunked_attention"], "attention_chunk_size": 20}
    Llama4ForCausalLM(Llama4TextConfig(**COMMON, **layers, num_local_experts=2)).save_pretrained(folder)
    with pytest.raises(ConfigError, match=r"llama4_text\): it has unsupported layers \(chunked_attention\)"):
        TorchLearner(folder, threads=1, dtype="float32")
