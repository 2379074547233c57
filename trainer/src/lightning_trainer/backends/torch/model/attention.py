"""Attention as a plan. A transformers model asks the plan it was called with; the plan knows where keys and values are.

All tokens of a forward pass are packed into one sequence without padding, so the linear layers waste nothing. What may
see what is the plan's business: `step.StepPlan` for generation, `tree.TreePlan` for training.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
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


def attend(  # noqa: PLR0917  a formula's letters
    query_RKQD: Tensor,
    prefixes: Sequence[tuple[Tensor | None, Tensor, Tensor]],
    keys_BLD: Tensor,
    values_BLD: Tensor,
    bias_BQL: Tensor,
    scale: float,
) -> Tensor:
    """Softmax attention to prefixes and own tokens together. B = R * K.

    Products of plain matrices: for few queries they take half the time of torch's fused attention on a CPU, as long as
    keys and values lie without gaps.

    Args:
        query_RKQD: (R, K, Q, D) queries of each slot and key head.
        prefixes: (rows, keys (K, P, D), values): what the rows named see in full; None for all rows.
        keys_BLD: keys of the slots' own tokens.
        values_BLD: their values.
        bias_BQL: 0 where an own token is seen, else very negative.
        scale: what scores are multiplied by.

    Returns:
        (R, K, Q, D).
    """
    rows, key_heads, queries, width = query_RKQD.shape
    query_BQD = query_RKQD.reshape(rows * key_heads, queries, width)
    own = torch.baddbmm(bias_BQL, query_BQD, keys_BLD.transpose(1, 2), alpha=scale)
    if not prefixes:
        return torch.bmm(own.softmax(-1), values_BLD).view(rows, key_heads, queries, width)
    own = own.view(rows, key_heads, queries, -1)
    parts = [_prefix_scores(query_RKQD, which, keys, scale) for which, keys, _ in prefixes]
    weights = torch.cat([*parts, own], -1).softmax(-1)
    first = weights.shape[-1] - own.shape[-1]
    out = torch.bmm(weights[..., first:].reshape(rows * key_heads, queries, -1), values_BLD)
    out = out.view(rows, key_heads, queries, width)
    end = 0
    for which, _, values_KPD in prefixes:
        start, end = end, end + values_KPD.shape[1]
        seen = weights[..., start:end] if which is None else weights[..., start:end][which]
        seen_KMP = seen.transpose(0, 1).reshape(key_heads, -1, end - start)
        more = torch.bmm(seen_KMP, values_KPD).view(key_heads, -1, queries, width).transpose(0, 1)
        out = out + more if which is None else out.index_add(0, which, more)
    return out


def _prefix_scores(query_RKQD: Tensor, which: Tensor | None, keys_KPD: Tensor, scale: float) -> Tensor:
    """(R, K, Q, P) scores of one prefix: one product for all rows that have it, hidden from the others."""
    rows, key_heads, queries, width = query_RKQD.shape
    query = query_RKQD if which is None else query_RKQD[which]
    query_KMD = query.transpose(0, 1).reshape(key_heads, -1, width)
    scores = torch.bmm(query_KMD, keys_KPD.transpose(1, 2)).mul_(scale)
    scores = scores.view(key_heads, -1, queries, scores.shape[-1]).transpose(0, 1)
    if which is None:
        return scores
    hidden = scores.new_full((rows, *scores.shape[1:]), torch.finfo(scores.dtype).min / 2)
    hidden[which] = scores
    return hidden


def to_key_heads(query_RQHD: Tensor, key_heads: int) -> Tensor:
    """(R, Q, H, D) to (R, K, H / K * Q, D)."""
    rows, queries, heads, width = query_RQHD.shape
    split = query_RQHD.view(rows, queries, key_heads, heads // key_heads, width)
    return split.permute(0, 2, 3, 1, 4).reshape(rows, key_heads, -1, width)


def from_key_heads(out_RKQD: Tensor, queries: int) -> Tensor:
    """(R, K, H / K * Q, D) to (R, Q, K, H / K, D)."""
    rows, key_heads, _, width = out_RKQD.shape
    return out_RKQD.view(rows, key_heads, -1, queries, width).permute(0, 3, 1, 2, 4)


def bias(hidden_RQL: NDArray[np.bool_], dtype: torch.dtype, device: torch.device) -> Tensor:
    """(R, Q, L): 0 where a token is seen, else half the lowest number, to which a score can be added."""
    zeros = torch.zeros(hidden_RQL.shape, dtype=dtype)
    return zeros.masked_fill_(torch.from_numpy(hidden_RQL), torch.finfo(dtype).min / 2).to(device)


def for_heads(bias_RQL: Tensor, key_heads: int, heads: int) -> Tensor:
    """(R, Q, L) to (R * K, H / K * Q, L), as `to_key_heads` orders queries."""
    rows, queries, length = bias_RQL.shape
    expanded = bias_RQL[:, None, None].expand(rows, key_heads, heads // key_heads, queries, length)
    return expanded.reshape(rows * key_heads, -1, length)
