"""vLLM that rounds the frozen weights itself, with bitsandbytes, instead of reading weights that the learner rounded.

Its loader calls bitsandbytes' `quantize_4bit` with the arguments of our layer (NF4, quantised scales, blocks of 64) on
each linear layer except the head, in the number format of the model's files (vLLM 0.27.1,
`model_loader/bitsandbytes_loader.py`). Codes and scales are therefore those of the learner if the files have the
learner's format. There is no such loader for 8 bits: vLLM reads bitsandbytes' LLM.int8 only, whose numbers differ.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from lightning_trainer.config.mistakes import refuse
from lightning_trainer.engines.contract import EngineRequest
from lightning_trainer.engines.devices import gpu_totals

BITS: Final = 4
_FORMAT: Final = "bfloat16"


def read_vllm_bits(options: Mapping[str, Any]) -> int | None:
    """Return to how many bits vLLM rounds with these options; None: it does not."""
    return BITS if options.get("quantization") == "bitsandbytes" else None


def check_rounding(request: EngineRequest, *, installed: bool) -> None:
    """Check that vLLM rounds to the learner's weights.

    Args:
        request: what it serves.
        installed: whether bitsandbytes can be imported in its environment.

    Raises:
        ConfigError: it would have others; the message says what to change.
    """
    if read_vllm_bits(request.options) is None:
        return
    given = "engine_options: quantization = bitsandbytes"
    refuse(
        {
            f"{given} rounds to {BITS} bits. Set base_bits = {BITS}, or leave it out.": request.base_bits != BITS,
            f"{given} needs a GPU. Leave it out: vLLM then gets the learner's rounded weights.": (
                request.device == "cpu" or not gpu_totals()
            ),
            f"{given} rounds weights in the format of the model's files, which must be {_FORMAT}, as in the learner."
            " Convert the model, or leave it out.": _format_of(request.model) != _FORMAT or request.dtype == "float32",
            f"{given} needs bitsandbytes in vLLM's environment. Install it there.": not installed,
        }
    )


def _format_of(model: Path) -> str | None:
    values: dict[str, str] = json.loads((model / "config.json").read_text(encoding="utf-8"))
    return values.get("dtype") or values.get("torch_dtype")
