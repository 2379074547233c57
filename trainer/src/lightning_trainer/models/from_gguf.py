"""Make a model folder from a GGUF file: bfloat16 weights, a tokenizer that loads anywhere, a chat template."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import torch


def convert(weights: Path, folder: Path, template: str) -> None:
    """Write the folder.

    Args:
        weights: GGUF file of a ChatML model, whose turns are ``<|im_start|>role ... <|im_end|>``.
        folder: where to write.
        template: the chat template to store with it, as Jinja text.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source, name = str(weights.parent), weights.name
    with _read_once():
        model: Any = AutoModelForCausalLM.from_pretrained(
            source, gguf_file=name, dtype=torch.bfloat16, **_dequantize_option()
        )
        tokenizer: Any = AutoTokenizer.from_pretrained(source, gguf_file=name)
    for owner, left_over in ((model, "hf_quantizer"), (model.config, "quantization_config")):
        if hasattr(owner, left_over):
            delattr(owner, left_over)
    for kind, text in (("bos", "<|im_start|>"), ("eos", "<|im_end|>"), ("pad", "<|im_end|>")):
        setattr(tokenizer, f"{kind}_token", text)
    tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.chat_template = template
    for settings in (model.config, model.generation_config):
        settings.bos_token_id = tokenizer.bos_token_id
        settings.eos_token_id = settings.pad_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _name_common_class(folder / "tokenizer_config.json")


def _dequantize_option() -> dict[str, Any]:
    """Return the option to dequantize. Without it, newer transformers keeps GGUF's blocks, which it cannot save."""
    from transformers.utils import quantization_config

    chosen = getattr(quantization_config, "GgufConfig", None)
    return {} if chosen is None else {"quantization_config": chosen(dequantize=True)}  # 5.9 always dequantizes


@contextmanager
def _read_once() -> Iterator[None]:
    """Cache what is read, because transformers 5.23 parses the file three times and lists names once per module."""
    names = ("GGUFReader", "get_tensor_name_map")
    own = {name: getattr(gguf, name) for name in names}
    try:
        for name in names:
            setattr(gguf, name, functools.cache(own[name]))
        yield
    finally:
        for name in names:
            setattr(gguf, name, own[name])


def _name_common_class(path: Path) -> None:
    """Name the tokenizer class that every version of transformers, and other programs that read the folder, support."""
    settings = json.loads(path.read_text(encoding="utf-8"))
    kept = {key: value for key, value in settings.items() if key not in {"backend", "is_local", "local_files_only"}}
    path.write_text(json.dumps({**kept, "tokenizer_class": "PreTrainedTokenizerFast"}, indent=2), encoding="utf-8")
