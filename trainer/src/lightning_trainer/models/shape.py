"""Sizes of a model, read from its config.json: enough to plan memory before anything is loaded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from lightning_spans.errors import ConfigError

EXPERTS: Final = ("num_experts", "num_local_experts", "n_routed_experts")
"""Fields of a configuration of which a mixture of experts has one, above 0."""

_LONGROPE: Final = ("longrope", "su")  # its older name


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes of a decoder.

    Attributes:
        parameters: number of weights; tied embeddings count once.
        layers: number of decoder layers.
        hidden: width of the residual stream.
        kv_width: key and value heads times their width: a token keeps twice this for each layer.
        inner: width between the two products of its feed-forward layers.
        heads_width: query heads times their width.
        vocabulary: number of token ids.
        context: most tokens of prompt and answer together, unless positions are scaled; with longrope positions, the
            default (`longrope_length`).
        stretched: whether the model scales its positions, so that vLLM may accept more than `context`.
        longrope: whether it has longrope positions, so that longer sequences have other frequencies.
        tied: whether the output layer shares the embedding's weights.
    """

    parameters: int
    layers: int
    hidden: int
    kv_width: int
    inner: int
    heads_width: int
    vocabulary: int
    context: int
    tied: bool
    stretched: bool = False
    longrope: bool = False

    @property
    def linear(self) -> int:
        """Number of weights in the decoder's linear layers, without the output layer."""
        ends = (1 if self.tied else 2) * self.vocabulary * self.hidden + self.hidden
        return self.parameters - ends - 2 * self.hidden * self.layers

    def count_adapter(self, rank: int) -> int:
        """Count the weights of one adapter over all linear layers but the head: rank times (in + out) of each."""
        attention = 2 * (self.hidden + self.heads_width) + 2 * (self.hidden + self.kv_width)
        return self.layers * rank * (attention + 3 * (self.hidden + self.inner))


def quantised_bytes(shape: Shape, bits: int | None, *, width: int) -> int:
    """Return the bytes of a frozen model's weights.

    Args:
        shape: of the model.
        bits: of the weights in linear layers; None: as the others. Each 64 weights also have a scale: for 4 bits one
            byte, and 4 more for each 256 scales; for 8 bits 4 bytes.
        width: bytes of each other weight.
    """
    if bits is None:
        return width * shape.parameters
    scale = (1 + 4 / 256) / 64 if bits == 4 else 4 / 64
    return width * (shape.parameters - shape.linear) + int(shape.linear * (bits / 8 + scale))


def read_shape(model: str) -> Shape | None:
    """Read the shape of a local model folder; None if the model is a hub id or of an unknown kind.

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
    """Return the shape of a dense Llama-like decoder (Llama, Qwen, Mistral, SmolLM); None for other kinds."""
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
    if any(not isinstance(values.get(name), int) for name in names) or any(values.get(name) for name in EXPERTS):
        return None
    hidden, layers, heads, inner, vocabulary = (int(values[name]) for name in names)
    head = int(values.get("head_dim") or hidden // heads)
    kv_width = int(values.get("num_key_value_heads") or heads) * head
    attention = hidden * (2 * heads * head + 2 * kv_width)
    layer = attention + 3 * hidden * inner + 2 * hidden
    tied = bool(values.get("tie_word_embeddings", False))
    short = longrope_length(values)
    return Shape(
        parameters=layers * layer + (1 if tied else 2) * vocabulary * hidden + hidden,
        layers=layers,
        hidden=hidden,
        kv_width=kv_width,
        inner=inner,
        heads_width=heads * head,
        vocabulary=vocabulary,
        context=int(short or values.get("max_position_embeddings") or 4096),
        tied=tied,
        stretched=bool(values.get("rope_scaling") or (values.get("rope_parameters") or {}).get("factor")),
        longrope=short is not None,
    )


def longrope_length(values: Mapping[str, Any]) -> int | None:
    """Return the most tokens for which longrope positions (Phi-3, Phi-4) have short frequencies.

    vLLM and the embedded backend use them for all sequences if `max_model_len` is at most that, which is the default,
    and the long ones for all sequences otherwise.

    Args:
        values: of a model's config.json.

    Returns:
        None for other kinds of positions.
    """
    positions = values.get("rope_scaling") or values.get("rope_parameters") or {}
    if (positions.get("rope_type") or positions.get("type")) not in _LONGROPE:
        return None
    named = [of.get("original_max_position_embeddings") for of in (values, positions)]
    return next((length for length in named if length), values.get("max_position_embeddings"))


def lora_parameters(folder: Path, rank: int) -> int | None:
    """Count the weights of one adapter of the model in a folder.

    Returns:
        None if the model is of an unknown kind.
    """
    values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    values = values.get("text_config") or values
    shape = shape_of(values)
    return None if shape is None else shape.count_adapter(rank)


def activation_bytes(hidden: int, inner: int, *, width: int, tokens: int, attention: int | None = None) -> int:
    """Return the bytes that a layer keeps for its backward pass, counted for Llama's layers in bfloat16.

    Args:
        hidden: its width.
        inner: width between the two products of its feed-forward part.
        width: bytes of each number.
        tokens: of the forward pass.
        attention: width of queries, keys and values together; None: three times `hidden`.
    """
    queries_keys_values = 3 * hidden if attention is None else attention
    return tokens * width * (8 * hidden + 2 * queries_keys_values + 4 * inner)
