"""Attention as a plan. A transformers model calls the plan that it was given, which knows where keys and values are.

All tokens of a forward pass are packed into one sequence without padding, so the linear layers waste nothing. The plan
decides which tokens see which: `step.StepPlan` in generation, `tree_plan.TreePlan` in training.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "lightning_plan"
_NUMBER = "lightning_number"


@dataclass(frozen=True, slots=True, eq=False)
class AttentionLayer:
    """How one layer attends.

    Attributes:
        number: of the layer, from 0, among those that attend.
        scale: factor of the scores.
        window: a token sees itself and those less than so many positions before it; None: all before it.
        sinks_H: (H,) an additional score of each query head, without a value; None: none.
        cap: limit of the scores, as cap * tanh(score / cap); None: no limit.
    """

    number: int
    scale: float
    window: int | None = None
    sinks_H: Tensor | None = None
    cap: float | None = None

    def scores(self, products: Tensor) -> Tensor:
        """Return scores from products of queries and keys."""
        scaled = products.mul_(self.scale)
        return scaled if self.cap is None else torch.tanh(scaled / self.cap) * self.cap

    def weights(self, scores_RKQL: Tensor) -> Tensor:
        """Return the softmax of scores, with sinks in its denominator; queries in the order of `to_key_heads`."""
        if self.sinks_H is None:
            return scores_RKQL.softmax(-1)
        rows, key_heads, queries, _ = scores_RKQL.shape
        each = queries * key_heads // len(self.sinks_H)
        sinks = self.sinks_H.to(scores_RKQL.dtype).view(key_heads, -1).repeat_interleave(each, 1)
        return torch.cat([scores_RKQL, sinks[None, :, :, None].expand(rows, -1, -1, -1)], -1).softmax(-1)[..., :-1]


class AttentionPlan(Protocol):
    """Attention of one forward pass over packed tokens. Axes: N tokens, H query heads, KV key heads, D head width."""

    def attend(self, layer: AttentionLayer, query_NHD: Tensor, key_NKD: Tensor, value_NKD: Tensor) -> Tensor:
        """Attend in one layer.

        Args:
            layer: how it attends.
            query_NHD: (N, H, D) queries, rotated.
            key_NKD: (N, KV, D) keys of the same tokens, rotated.
            value_NKD: (N, KV, D) their values.

        Returns:
            (N, H, D).
        """
        ...


def register() -> None:
    """Make ``attn_implementation=NAME`` known to transformers."""
    ALL_ATTENTION_FUNCTIONS.register(NAME, _attention)


def layers_of(body: torch.nn.Module, but: Collection[torch.nn.Module]) -> list[Any]:
    """Return the attention modules that project their own keys, without those named."""
    return [module for module in body.modules() if hasattr(module, "k_proj") and module not in but]


def number(layers: Sequence[Any]) -> None:
    """Number the attention layers of a model that has other layers, too: a cache has a place only for each of these."""
    for place, module in enumerate(sorted(layers, key=lambda module: int(module.layer_idx))):
        setattr(module, _NUMBER, place)


def _attention(  # noqa: PLR0917  transformers passes them by position
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: Tensor | None,
    scaling: float | None = None,
    plan: AttentionPlan | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    **_options: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers calls it: (1, H, N, D) queries, (1, KV, N, D) keys and values to (1, N, H, D)."""
    if plan is None:
        raise ValueError("this model was loaded for the embedded engine: call it with a plan, or load it again")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    place: int = getattr(module, _NUMBER, module.layer_idx)  # type: ignore[arg-type]  # every attention module of transformers has an index
    layer = AttentionLayer(place, scale, sliding_window, s_aux, softcap)
    out = plan.attend(layer, query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1))
    return out[None], None


@dataclass(frozen=True, slots=True, eq=False)
class SeenPrefix:
    """Tokens that all rows see.

    Attributes:
        keys_KPD: their keys.
        values_KPD: their values.
        bias_R1QP: 0 if a query sees a token, otherwise very negative; None: all see all.
    """

    keys_KPD: Tensor
    values_KPD: Tensor
    bias_R1QP: Tensor | None = None


def attend(  # noqa: PLR0917  a formula's letters
    layer: AttentionLayer,
    query_RKQD: Tensor,
    prefix: SeenPrefix | None,
    keys_BLD: Tensor,
    values_BLD: Tensor,
    bias_BQL: Tensor,
) -> Tensor:
    """Softmax attention to a prefix and own tokens together. B = R * K.

    Products of plain matrices: for few queries they take half the time of torch's fused attention on a CPU, if keys and
    values are contiguous.

    Args:
        layer: how it attends.
        query_RKQD: (R, K, Q, D) queries of each row and key head.
        prefix: tokens that all rows see before their own.
        keys_BLD: keys of the rows' own tokens.
        values_BLD: their values.
        bias_BQL: 0 if an own token is seen, otherwise very negative.

    Returns:
        (R, K, Q, D).
    """
    rows, key_heads, queries, width = query_RKQD.shape
    query_BQD = query_RKQD.reshape(rows * key_heads, queries, width)
    if layer.cap is None:
        own = torch.baddbmm(bias_BQL, query_BQD, keys_BLD.transpose(1, 2), alpha=layer.scale)
    else:
        own = layer.scores(torch.bmm(query_BQD, keys_BLD.transpose(1, 2))) + bias_BQL
    own = own.view(rows, key_heads, queries, -1)
    before = 0 if prefix is None else prefix.keys_KPD.shape[1]
    weights = layer.weights(own if prefix is None else torch.cat([_prefix_scores(layer, query_RKQD, prefix), own], -1))
    out = torch.bmm(weights[..., before:].reshape(rows * key_heads, queries, -1), values_BLD)
    out = out.view(rows, key_heads, queries, width)
    if prefix is None:
        return out
    seen_KMP = weights[..., :before].transpose(0, 1).reshape(key_heads, -1, before)
    more = torch.bmm(seen_KMP, prefix.values_KPD).view(key_heads, rows, queries, width)
    return out + more.transpose(0, 1)


def _prefix_scores(layer: AttentionLayer, query_RKQD: Tensor, prefix: SeenPrefix) -> Tensor:
    """(R, K, Q, P) scores of a prefix: one product for all rows."""
    rows, key_heads, queries, width = query_RKQD.shape
    query_KMD = query_RKQD.transpose(0, 1).reshape(key_heads, -1, width)
    scores = layer.scores(torch.bmm(query_KMD, prefix.keys_KPD.transpose(1, 2)))
    scores = scores.view(key_heads, rows, queries, -1).transpose(0, 1)
    return scores if prefix.bias_R1QP is None else scores + prefix.bias_R1QP


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
    """(R, Q, L): 0 if a token is seen, otherwise half the lowest number, to which a score can be added."""
    zeros = torch.zeros(hidden_RQL.shape, dtype=dtype)
    return zeros.masked_fill_(torch.from_numpy(hidden_RQL), torch.finfo(dtype).min / 2).to(device)


def for_heads(bias_RQL: Tensor, key_heads: int, heads: int) -> Tensor:
    """(R, Q, L) to (R * K, H / K * Q, L), as `to_key_heads` orders queries."""
    rows, queries, length = bias_RQL.shape
    expanded = bias_RQL[:, None, None].expand(rows, key_heads, heads // key_heads, queries, length)
    return expanded.reshape(rows * key_heads, -1, length)


def hidden_own(seen_RQ: NDArray[np.int64], length: int, window: int | None) -> NDArray[np.bool_]:
    """(R, Q, L) which own tokens a query does not see; its own is number `seen_RQ` - 1."""
    places, seen = np.arange(length), seen_RQ[..., None]
    return places >= seen if window is None else (places >= seen) | (places < seen - window)


def hidden_before(
    positions_RQ: NDArray[np.int64], length: int, window: int | None
) -> tuple[int, NDArray[np.bool_] | None]:
    """Return the first token of a prefix that any query sees, and which tokens from there on each query does not see.

    Args:
        positions_RQ: of the queries in their sequences, all at or after the prefix's end.
        length: of the prefix, P.
        window: of the layer.

    Returns:
        first, and (R, Q, P - first); None: all see all. `first` is `length` if no query sees anything.
    """
    if window is None:
        return 0, None
    first_RQ = positions_RQ - window + 1
    first = min(max(int(first_RQ.min()), 0), length)
    return first, np.arange(first, length) < first_RQ[..., None] if first_RQ.max() > first else None


def prefix_bias(hidden_RQP: NDArray[np.bool_] | None, shares: int, like: Tensor) -> Tensor | None:
    """(R, 1, H / K * Q, P) the bias of `SeenPrefix`, for `shares` query heads per key head."""
    return None if hidden_RQP is None else for_heads(bias(hidden_RQP, like.dtype, like.device), 1, shares)[:, None]
