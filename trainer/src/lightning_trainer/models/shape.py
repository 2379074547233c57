"""What a model is made of, read from its config.json: enough to plan memory before anything is loaded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_spans.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A decoder's sizes.

    Attributes:
        parameters: number of weights; tied embeddings count once.
        layers: number of decoder layers.
        hidden: width of the residual stream.
        kv_width: key and value heads times their width: a token keeps twice this for each layer.
        vocabulary: number of token ids.
        context: most tokens of prompt and answer together, unless they are stretched.
        stretched: whether the model scales its positions, so that vLLM may take more than `context`.
        tied: whether the output layer shares the embedding's weights.
    """

    parameters: int
    layers: int
    hidden: int
    kv_width: int
    vocabulary: int
    context: int
    tied: bool
    stretched: bool = False


def read_shape(model: str) -> Shape | None:
    """Read the shape of a local model folder; None where the model is a hub id or of a kind not known here.

    Raises:
        ConfigError: the folder has no config.json, or it is not JSON.
    """
    folder = Path(model)
    if not folder.is_dir():
        return None
    try:
        values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except OSError:
        raise ConfigError(
            f"model folder {folder} has no config.json. Give a folder that transformers can load."
        ) from None
    except ValueError as error:
        raise ConfigError(f"{folder / 'config.json'} is not JSON: {error}.") from None
    return shape_of(values.get("text_config") or values)


def shape_of(values: Mapping[str, Any]) -> Shape | None:
    """Count the weights of a dense Llama-like decoder (Llama, Qwen, Mistral, SmolLM); None for other kinds."""
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
    if any(not isinstance(values.get(name), int) for name in names) or values.get("num_experts"):
        return None
    hidden, layers, heads, inner, vocabulary = (int(values[name]) for name in names)
    head = int(values.get("head_dim") or hidden // heads)
    kv_width = int(values.get("num_key_value_heads") or heads) * head
    attention = hidden * (2 * heads * head + 2 * kv_width)
    layer = attention + 3 * hidden * inner + 2 * hidden
    tied = bool(values.get("tie_word_embeddings", False))
    return Shape(
        parameters=layers * layer + (1 if tied else 2) * vocabulary * hidden + hidden,
        layers=layers,
        hidden=hidden,
        kv_width=kv_width,
        vocabulary=vocabulary,
        context=int(values.get("max_position_embeddings") or 4096),
        tied=tied,
        stretched=bool(values.get("rope_scaling") or (values.get("rope_parameters") or {}).get("factor")),
    )


def lora_parameters(folder: Path, rank: int) -> int | None:
    """Count the weights of one adapter over all linear layers but the head: rank times (in + out) of each.

    Returns:
        None where the model is of a kind not known here.
    """
    values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    values = values.get("text_config") or values
    shape = shape_of(values)
    if shape is None:
        return None
    heads = int(values["num_attention_heads"])
    queries = heads * int(values.get("head_dim") or shape.hidden // heads)
    inner = int(values["intermediate_size"])
    sides = 2 * (shape.hidden + queries) + 2 * (shape.hidden + shape.kv_width) + 3 * (shape.hidden + inner)
    return shape.layers * rank * sides


def activation_bytes(layers: int, hidden: int, *, width: int, tokens: int) -> int:
    """Estimate the bytes that a forward pass keeps for its backward pass: 34 numbers a token, layer and width.

    Args:
        layers: of the model.
        hidden: its width.
        width: bytes of each number.
        tokens: of the forward pass.
    """
    return 34 * layers * hidden * width * tokens
