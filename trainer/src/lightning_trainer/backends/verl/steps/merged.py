"""A LoRA checkpoint as a model that any library loads.

verl writes base weights and adapters side by side, under the names that they have while peft wraps the model. A loader
finds none of the model's weights in such a folder, and starts from random ones.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from lightning_spans.errors import LightningError
from lightning_trainer.report.metrics import write_atomically

LORA: Final = "lora_train_meta.json"  # verl's: rank and alpha, next to the model's folder
_WRAPPED: Final = "base_model.model."
_ADAPTER: Final = ".lora_"
_BASE: Final = ".base_layer.weight"


def merge_adapters(folder: Path) -> None:
    """Add the adapters to the weights in a model's folder. If all weights were trained, there are none.

    Args:
        folder: with the model's files as verl wrote them.

    Raises:
        LightningError: an adapter is not of a linear layer, or belongs to no weight.
    """
    told = folder.parent / LORA
    if not told.is_file():
        return
    lora = json.loads(told.read_text(encoding="utf-8"))
    scale = lora["lora_alpha"] / lora["r"]
    files = sorted(folder.glob("*.safetensors"))
    names: dict[str, str] = {}
    with ExitStack() as stack:
        opened = [stack.enter_context(safe_open(path, framework="pt")) for path in files]
        weights = {name: file for file in opened for name in file.keys()}  # noqa: SIM118 - it is no mapping
        for path, file in zip(files, opened, strict=True):
            merged = {_plain(name): value for name, value in _merge_adapters(file.keys(), weights, scale)}
            names |= dict.fromkeys(merged, path.name)
            draft = path.with_suffix(".new")
            save_file(merged, draft, metadata={"format": "pt"})
            draft.replace(path)
    for index in folder.glob("*.safetensors.index.json"):
        table = json.loads(index.read_text(encoding="utf-8"))
        write_atomically(index, json.dumps({**table, "weight_map": names}).encode())


def _merge_adapters(names: list[str], weights: Mapping[str, Any], scale: float) -> Iterator[tuple[str, Tensor]]:
    """Yield weights with their adapters added, by their names in a file; the adapters themselves are left out."""
    for name in names:
        wrapped, _, adapter = name.partition(_ADAPTER)
        if adapter:
            if f"{wrapped}{_BASE}" not in weights:
                raise LightningError(f"the adapter {name} matches no weight, so it can't be merged into the model.")
            continue
        weight: Tensor = weights[name].get_tensor(name)
        if name.endswith(_BASE):
            weight = (weight.float() + scale * _adapter_delta(name, weights, weight)).to(weight.dtype)
        yield name, weight.contiguous()


def _adapter_delta(name: str, weights: Mapping[str, Any], weight: Tensor) -> Tensor:
    """Return what the adapter of a layer adds to its weight, without the scale."""
    factors = [name.replace(_BASE, f".lora_{factor}.default.weight") for factor in "BA"]
    if all(factor in weights for factor in factors):
        left, right = (weights[factor].get_tensor(factor).float() for factor in factors)
        added: Tensor = left @ right
        if added.shape == weight.shape:
            return added
    raise LightningError(
        f"the adapter of {name} does not belong to a linear layer, so it can't be merged into the model."
    )


def _plain(name: str) -> str:
    return name.removeprefix(_WRAPPED).replace(".base_layer.", ".")
