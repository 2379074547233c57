"""Whether the rows of a micro-batch are packed into one sequence, and by which attention. Does not import torch."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any, Final

from lightning_spans.errors import ConfigError

PACKED_ROWS: Final = "packed_rows"  # our attention over packed rows
# Decoders with plain attention: no soft capping, no sinks, no recurrent layers. tests/verl/test_packed.py has each.
PLAIN: Final = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "phi3", "smollm3", "granite", "olmo2")
_MODEL: Final = "actor_rollout_ref.model"
_PACKED: Final = f"{_MODEL}.use_remove_padding"
_ATTENTION: Final = f"+{_MODEL}.override_config.attn_implementation"


def has_flash_attention() -> bool:
    """Whether the package flash_attn is installed, which verl uses to pack rows."""
    return importlib.util.find_spec("flash_attn") is not None


def packs_without(model: str) -> bool:
    """Whether torch's kernels can attend to a model's packed rows: its folder is here, its attention is plain."""
    try:
        values = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return values.get("model_type") in PLAIN and not values.get("attn_logit_softcapping")


def packing(model: str, *, flash_attention: bool) -> dict[str, Any]:
    """Return verl's packing options: with flash-attn, with torch's kernels, or no packing."""
    if flash_attention:
        return {_PACKED: True}
    packed = packs_without(model)
    return {
        _PACKED: packed,
        _ATTENTION: PACKED_ROWS if packed else "sdpa",
        "+critic.model.override_config.attn_implementation": "sdpa",
        "critic.model.use_remove_padding": False,
    }


def settle(values: dict[str, Any], *, flash_attention: bool) -> None:
    """Make the packing options consistent after the table `verl` has changed some.

    Raises:
        ConfigError: rows should be split over devices, which needs flash-attn.
    """
    if flash_attention:
        return
    shared = [key for key, value in values.items() if key.endswith("ulysses_sequence_parallel_size") and value != 1]
    if shared:
        raise ConfigError(f"{shared[0]} needs flash attention. Install flash-attn, or leave it out of the table verl.")
    if values[_PACKED] is False and values[_ATTENTION] == PACKED_ROWS:
        values[_ATTENTION] = "sdpa"
