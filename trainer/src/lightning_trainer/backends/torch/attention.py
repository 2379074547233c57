"""Attention as a plan. A transformers model asks the plan it was called with; the plan knows where keys and values are.

All tokens of a forward pass are packed into one sequence without padding, so the linear layers waste nothing. What may
see what is the plan's business: `step.StepPlan` for generation, `tree.TreePlan` for training.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "lightning_plan"


class AttentionPlan(Protocol):
    """Attention of one forward pass over packed tokens. Axes: N tokens, H query heads, KV key heads, D head width."""

    def attend(self, layer: int, query_NHD: Tensor, key_NKD: Tensor, value_NKD: Tensor, scale: float) -> Tensor:
        """Attend in one layer.

        Args:
            layer: number of the layer, from 0.
            query_NHD: (N, H, D) queries, rotated.
            key_NKD: (N, KV, D) keys of the same tokens, rotated.
            value_NKD: (N, KV, D) their values.
            scale: what scores are multiplied by.

        Returns:
            (N, H, D).
        """
        ...


def register() -> None:
    """Make ``attn_implementation=NAME`` known to transformers."""
    ALL_ATTENTION_FUNCTIONS.register(NAME, _attention)


def _attention(  # noqa: PLR0917  transformers passes them by position
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: Tensor | None,
    scaling: float | None = None,
    plan: AttentionPlan | None = None,
    **_options: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers asks for it: (1, H, N, D) queries, (1, KV, N, D) keys and values, (1, N, H, D) back."""
    if plan is None:
        raise ValueError("this model was loaded for the embedded engine: call it with a plan, or load it anew")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    layer: int = module.layer_idx  # type: ignore[assignment]  # every attention module of transformers has one
    out = plan.attend(layer, query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), scale)
    return out[None], None
