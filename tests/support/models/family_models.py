"""Tiny random models of the architectures that families of models have, each with a family's tokenizer and template."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from support.models.model_families import Family, tokenizer_of

_COMMON: Final = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,  # vLLM's CPU attention has no narrower heads
    "max_position_embeddings": 4096,
    "initializer_range": 0.08,  # wide enough that answers depend on the prompt
    "tie_word_embeddings": False,
}
# What a configuration class needs beyond that, or has under another name.
_OWN: Final[dict[str, dict[str, Any]]] = {
    "Qwen2": {},
    "Qwen3": {},
    "Llama": {},
    "Mistral": {"sliding_window": None},
    "Glm4": {"partial_rotary_factor": 0.5},
    "Gemma3": {
        "sliding_window": 32,
        "query_pre_attn_scalar": 32,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "Gemma4": {
        "sliding_window": 64,
        "global_head_dim": 64,
        "hidden_size_per_layer_input": 8,
        "num_kv_shared_layers": 0,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "Qwen3_5": {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
    "Lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "GptOss": {
        "sliding_window": 32,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}
ONE_OF_EACH: Final = (
    "Qwen2.5", "Qwen3", "Llama 3.1", "Mistral v3", "GLM-4.5", "Gemma 3", "Gemma 4", "gpt-oss", "Qwen3.5", "LFM2.5",
)  # fmt: skip

# vLLM 0.27's CPU build computes the experts of gpt-oss in bfloat16 alone, wants torchvision for Qwen3.5, and settings
# for LFM2 that transformers' class does not have.
SERVED_BY_VLLM: Final = ("Qwen2.5", "Qwen3", "Llama 3.1", "Mistral v3", "GLM-4.5", "Gemma 3", "Gemma 4")


def make_family_model(folder: Path, family: Family, *, seed: int = 0) -> Path:
    """Write the folder of a random model of a family's architecture and give its path."""
    import torch
    import transformers

    name = family.architecture + ("Text" if family.architecture in {"Gemma3", "Gemma4", "Qwen3_5"} else "")
    tokenizer = tokenizer_of(family)
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    settings = {**_COMMON, **_OWN[family.architecture], **ids, "pad_token_id": tokenizer.pad_token_id}
    config = getattr(transformers, f"{name}Config")(vocab_size=len(tokenizer), **settings)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = getattr(transformers, f"{family.architecture}ForCausalLM")(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
