"""The linear layers of a frozen model in 4 or 8 bits: each multiplication dequantises the weights that it needs.

bitsandbytes quantises and dequantises: NF4 with quantised scales, or 8 bits with equal steps, in blocks of 64 weights.
Its own layers are not used. Its 8-bit layer also rounds activations, so that its gradients are off by 1 %; its 4-bit
layer repacks its weights on some processors and has no gradient afterwards (bitsandbytes 0.50). Here, a layer computes
exactly what an ordinary one with the dequantised weights would, in the forward and the backward pass.
"""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, cast

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from lightning_spans.errors import ConfigError
from lightning_trainer.models.bases import ROUNDED, NumberFormat, bits_in, write_format

_DEVICES: Final = ("cpu", "cuda")
# files of a model folder that are copied, in addition to its weights
_COPIED: Final = frozenset({".json", ".jinja", ".txt", ".model"})


class QuantisedLinear(nn.Linear):
    """A frozen linear layer. `weight` is dequantised on each access."""

    def __init__(self, linear: nn.Linear, bits: int, device: torch.device) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        codes, self._state = _quantise(linear.weight.detach().to(device), bits)
        self.codes = nn.Parameter(codes, requires_grad=False)
        bias = linear.bias
        self.register_parameter(
            "bias", None if bias is None else nn.Parameter(bias.detach().to(device), requires_grad=False)
        )

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """(out, in) in the model's own number format."""
        return _dequantise(self.codes.data, self._state)

    def forward(self, hidden: Tensor) -> Tensor:
        """Multiply with the dequantised weights."""
        return cast("Tensor", _DequantisedProduct.apply(hidden, self))  # type: ignore[no-untyped-call]


class _DequantisedProduct(torch.autograd.Function):
    """Dequantises again in the backward pass; otherwise all dequantised weights would stay in memory until then."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, layer: QuantisedLinear) -> Tensor:
        ctx.layer = layer
        return nn.functional.linear(hidden, layer.weight, layer.bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] @ ctx.layer.weight, None


def _quantise(weight: Tensor, bits: int) -> tuple[Tensor, Any]:
    from bitsandbytes import functional

    if bits == 4:
        codes, state = functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
    else:
        steps = cast("Any", functional).create_linear_map().to(weight.device)  # it has no type annotations
        codes, state = functional.quantize_blockwise(weight, code=steps, blocksize=64)
    return codes, state


def _dequantise(codes: Tensor, state: Any) -> Tensor:
    from bitsandbytes import functional

    read = functional.dequantize_blockwise if state.quant_type is None else functional.dequantize_4bit
    return read(codes, state)


def check_source(source: Path) -> None:
    """Refuse a model that is already quantised, or whose weights are already rounded.

    Raises:
        ConfigError: it is.
    """
    if (bits := bits_in(source / ROUNDED)) is not None:
        raise ConfigError(f"the weights in {source} are rounded to {bits} bits already. Leave base_bits out.")
    with suppress(OSError, ValueError):
        if json.loads((source / "config.json").read_text(encoding="utf-8")).get("quantization_config"):
            raise ConfigError(f"{source} is quantised already. Leave base_bits out, or give the model before that.")


def quantise(causal: Any, bits: int, device: torch.device, source: Path) -> None:
    """Quantise the linear layers of a model, except the head, whose rounding would affect every log-probability.

    Raises:
        ConfigError: bitsandbytes is missing or does not support the device, or the model has experts.
    """
    if find_spec("bitsandbytes") is None:
        raise ConfigError('base_bits needs bitsandbytes. Run: pip install "lightning-trainer[quantised]"')
    if device.type not in _DEVICES:
        raise ConfigError(f"base_bits works on {' and '.join(_DEVICES)}, not on {device.type}. Leave it out.")
    if any("experts" in name for name, _ in causal.named_parameters()):
        raise ConfigError(f"{source} has experts, which base_bits can't quantise. Leave it out.")
    head = causal.get_output_embeddings()
    for path, parent in list(causal.named_modules()):
        if "lora_" in path:
            continue
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and child is not head and not name.startswith("lora_"):
                setattr(parent, name, QuantisedLinear(child, bits, device))


def count_weights(causal: nn.Module) -> int:
    """Return the number of a model's weights, counting two 4-bit weights per byte."""
    packed = [module for module in causal.modules() if isinstance(module, QuantisedLinear)]
    more = sum(module.in_features * module.out_features - module.codes.numel() for module in packed)
    return more + sum(parameter.numel() for parameter in causal.parameters())


def write_dequantised(causal: Any, bits: int, source: Path, folder: Path) -> None:
    """Write a model folder with the weights that a quantised model computes with, file by file.

    Args:
        causal: the quantised model.
        bits: of its weights.
        source: the folder that it was loaded from.
        folder: receives the files.

    Raises:
        ConfigError: the model has other names for its weights than its files, or the folder cannot be written.
    """
    layers = {
        name.replace(".base_layer", ""): module
        for name, module in causal.named_modules()
        if isinstance(module, QuantisedLinear)
    }
    written: set[str] = set()
    try:
        for file in sorted(source.iterdir()):
            if file.suffix == ".safetensors":
                tensors = _dequantise_file(file, layers, causal.dtype)
                written |= {name.removesuffix(".weight") for name in tensors}
                save_file(tensors, folder / file.name, metadata={"format": "pt"})
            elif file.suffix in _COPIED:
                shutil.copy(file, folder)
        write_format(folder / ROUNDED, NumberFormat(bits))
    except OSError as error:
        raise ConfigError(f"the dequantised model for the engine can't be written to {folder}: {error}.") from None
    if missing := sorted(layers.keys() - written):
        raise ConfigError(
            f"{source} stores {missing[0]} under another name, so the engine can't get its dequantised weights. Use"
            " --engine embedded, or leave base_bits out."
        )


def _dequantise_file(file: Path, layers: dict[str, QuantisedLinear], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the tensors of a file, with those of quantised layers dequantised."""
    tensors = {}
    with safe_open(file, "pt") as stored:
        for key in stored.keys():  # noqa: SIM118 - it is no dictionary
            layer = layers.get(key.removesuffix(".weight")) if key.endswith(".weight") else None
            if layer is not None:
                tensors[key] = layer.weight.cpu().contiguous()
                continue
            tensor = stored.get_tensor(key)
            tensors[key] = tensor.to(dtype) if tensor.is_floating_point() else tensor
    return tensors
