"""How well an update uses its device: its floating-point operations compared with a large matrix product."""

from __future__ import annotations

import time
from functools import cache

import torch

from lightning_trainer.backends.torch.model.load import LoadedModel
from lightning_trainer.backends.torch.model.quantised import count_weights
from lightning_trainer.models.shape import EXPERTS
from lightning_trainer.report.speed.memory import process_peak


def flops_utilisation(model: LoadedModel, tokens: float, seconds: float, *, frozen: bool) -> float | None:
    """Return model FLOPs utilisation (MFU): the share of the device's speed that an update reached.

    For each weight and token, 2 operations are counted in the forward pass, 2 for the gradients of activations, and 2
    for those of weights unless these are frozen. Attention, passes without gradient, adapters, and an embedding that is
    only looked up are not counted.

    Args:
        model: that was trained.
        tokens: forwarded with gradient, in all passes.
        seconds: of the update.
        frozen: whether only adapters were trained.

    Returns:
        None for a mixture of experts, in which each token uses only some of the weights, and if nothing was forwarded.
    """
    config = model.causal.config.get_text_config()
    sparse = any(getattr(config, name, None) for name in EXPERTS)
    if sparse or not tokens or not seconds:
        return None
    weights = count_weights(model.causal)
    inputs, outputs = model.causal.get_input_embeddings(), model.causal.get_output_embeddings()
    if outputs is not None and outputs.weight is not inputs.weight:
        weights -= inputs.weight.numel()
    operations = (4 if frozen else 6) * weights * tokens
    return float(operations / seconds / _product_speed(model.shape.device, model.shape.dtype))


@cache
def _product_speed(device: torch.device, dtype: torch.dtype) -> float:
    """Return operations per second of a large matrix product: the best of a few."""
    size = 512 if device.type == "cpu" else 8192
    left, right = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    best = 0.0
    for _ in range(4):
        began = time.perf_counter()
        float((left @ right)[0, 0])  # reading a number waits for the product
        best = max(best, 2 * size**3 / (time.perf_counter() - began))
    return best


def release_memory(device: torch.device) -> None:
    """Release memory that no tensor uses on the GPU, for other processes; otherwise torch keeps it."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def peak_memory(device: torch.device) -> dict[str, float]:
    """Return the most bytes in use: by this process so far, and on CUDA by its tensors since the last call."""
    peak = {"memory_bytes": float(process_peak())}
    if device.type == "cuda":
        peak["gpu_memory_bytes"] = float(torch.cuda.max_memory_allocated(device))
        torch.cuda.reset_peak_memory_stats(device)
    return peak
