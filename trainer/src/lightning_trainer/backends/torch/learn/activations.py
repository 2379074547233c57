"""Activations that a forward pass keeps for its backward pass.

All, or only each layer's inputs if memory requires it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from lightning_trainer.backends.torch.model import recurrent
from lightning_trainer.backends.torch.model.load import ForwardPlan, LoadedModel
from lightning_trainer.backends.torch.options import TorchOptions
from lightning_trainer.models.shape import activation_bytes

_SHARE = 0.8  # share of the free memory that kept activations may take


def save_memory(
    model: LoadedModel, options: TorchOptions, plan: ForwardPlan, tokens: int
) -> AbstractContextManager[None]:
    """Return a context in which layers keep only their inputs, if this was chosen or the rest would not fit.

    Args:
        model: called in the context.
        options: `activation_checkpointing`.
        plan: of the forward pass.
        tokens: of the forward pass.
    """
    if not torch.is_grad_enabled() or not _saves_memory(model, options, tokens):
        return nullcontext()
    return _again(model.causal, plan)


def _saves_memory(model: LoadedModel, options: TorchOptions, tokens: int) -> bool:
    config = model.causal.config.get_text_config()
    if getattr(config, "num_kv_shared_layers", 0) or options.activation_checkpointing == "off":
        return False  # layers that read each other's keys cannot be recomputed one by one
    if options.activation_checkpointing == "on":
        return True
    width = model.shape.dtype.itemsize
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    layer = activation_bytes(config.hidden_size, inner, width=width, tokens=tokens)
    return exceeds(config.num_hidden_layers * layer, free_memory(model.shape.device))


def exceeds(needed: int, free: int | None) -> bool:
    """Return whether activations are too large for the free memory; False if that is unknown."""
    return free is not None and needed > _SHARE * free


def free_memory(device: torch.device) -> int | None:
    """Return the bytes that tensors can still take on a GPU; None on another device."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


@contextmanager
def _again(causal: nn.Module, plan: ForwardPlan) -> Iterator[None]:
    """Let the layers of a model be recomputed in the backward pass, under the same plan."""
    layers: list[Any] = [module for module in causal.modules() if isinstance(module, GradientCheckpointingLayer)]
    own = [vars(layer).get("forward") for layer in layers]
    for layer in layers:
        layer.forward = partial(
            checkpoint,
            layer.forward,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=lambda: (nullcontext(), recurrent.use_plan(plan)),
        )
    try:
        yield
    finally:
        for layer, forward in zip(layers, own, strict=True):
            if forward is None:
                del layer.forward
            else:
                layer.forward = forward
