"""Whether vLLM gets the adapters of LoRA as they are, or whole weights into which they are merged. No verl here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

MERGED: Final = "actor_rollout_ref.model.lora.merge"
LOAD_FORMAT: Final = "actor_rollout_ref.rollout.load_format"
_MIDDLEWARE: Final = "+actor_rollout_ref.rollout.engine_kwargs.vllm.middleware"
_LISTING: Final = "lightning_trainer.backends.verl.listing.AdapterListing"


def sends_adapters(lora_rank: int, passed: Mapping[str, Any]) -> bool:
    """Whether vLLM gets adapters.

    Args:
        lora_rank: of the run.
        passed: the table `verl` of the run, by dotted key.
    """
    return lora_rank > 0 and not any(value for key, value in passed.items() if key.lstrip("+") == MERGED)


def adapter_options(lora_rank: int, passed: Mapping[str, Any]) -> dict[str, Any]:
    """Return verl's options for the weights that vLLM gets.

    If it gets adapters, it reads the frozen model from its folder, and its server lists the adapter. Otherwise the
    trainer's weights arrive before the first call, so it starts from dummies.
    """
    if not sends_adapters(lora_rank, passed):
        return {LOAD_FORMAT: "dummy", **({MERGED: True} if lora_rank else {})}
    return {LOAD_FORMAT: "auto", MERGED: False, _MIDDLEWARE: _LISTING}
