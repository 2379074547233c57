"""Attention over packed rows, with gradient.

Rows with a common trunk attend to it together, in one product without a mask; each attends separately to the tokens
after the trunk. Generation does the same, so both have the same rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from lightning_trainer.backends.torch.learn.tree import IntArray, PackedMicroBatch, Segment
from lightning_trainer.backends.torch.learn.tree_memory import TreeMemory
from lightning_trainer.backends.torch.model.attention import (
    AttentionLayer,
    SeenPrefix,
    attend,
    bias,
    for_heads,
    from_key_heads,
    hidden_before,
    hidden_own,
    prefix_bias,
    to_key_heads,
)
from lightning_trainer.backends.torch.model.recurrent import Layer

_SHORTEST_TRUNK = 64


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """Tokens that attend in the same way.

    Attributes:
        trunk: packed places of the tokens that all of them see.
        own: packed places after the trunk, which they see causally.
        new: number of these, at the end, that attend.
    """

    trunk: IntArray
    own: IntArray
    new: int


class TreePlan:
    """The paths of a packed micro-batch: `attention.AttentionPlan`, `recurrent.RecurrentPlan`."""

    def __init__(self, packed: PackedMicroBatch, dtype: torch.dtype, device: torch.device) -> None:
        self._buckets = [_Bucket(group, dtype, device) for group in _similar(_pieces(packed.segments))]
        order = np.concatenate([bucket.places for bucket in self._buckets])
        self._back = torch.from_numpy(np.argsort(order)).to(device)  # from the order of the buckets to the packed order
        queries, seen = [bucket.queries for bucket in self._buckets], [bucket.seen for bucket in self._buckets]
        self._queries, self._seen = (torch.from_numpy(np.concatenate(each)).to(device) for each in (queries, seen))
        self._query_counts, self._seen_counts = [len(each) for each in queries], [len(each) for each in seen]
        self._segments, self._device = packed.segments, device
        self._memory: TreeMemory | None = None

    def attend(self, layer: AttentionLayer, query_NHD: Tensor, key_NKD: Tensor, value_NKD: Tensor) -> Tensor:
        """Attend bucket by bucket. Tokens that several rows see are gathered for each row, so that gradients add up.

        They are gathered for all buckets at once, because the gradient of a gathered tensor is as large as its source.
        """
        inputs = (layer, query_NHD, key_NKD, value_NKD)
        if torch.is_grad_enabled():  # weights of all rows and layers would take gigabytes: recomputed when needed
            return checkpoint(self._attend, *inputs, use_reentrant=False, preserve_rng_state=False)  # type: ignore[no-any-return]
        return self._attend(*inputs)

    def recur(self, _number: int, layer: Layer, hidden_NW: Tensor) -> Tensor:
        """Run a recurrent layer stretch by stretch; its intermediate results are recomputed when needed."""
        if self._memory is None:
            self._memory = TreeMemory(self._segments, self._device)
        if torch.is_grad_enabled():
            inputs = (self._memory.recur, layer, hidden_NW)
            return checkpoint(*inputs, use_reentrant=False, preserve_rng_state=False)  # type: ignore[no-any-return]
        return self._memory.recur(layer, hidden_NW)

    def _attend(self, layer: AttentionLayer, query_NHD: Tensor, key_NKD: Tensor, value_NKD: Tensor) -> Tensor:
        queries = torch.split(query_NHD.index_select(0, self._queries), self._query_counts)
        keys, values = (
            torch.split(part.index_select(0, self._seen), self._seen_counts) for part in (key_NKD, value_NKD)
        )
        parts = [
            bucket.attend(layer, *gathered)
            for bucket, *gathered in zip(self._buckets, queries, keys, values, strict=True)
        ]
        return torch.cat(parts).index_select(0, self._back)


def _pieces(segments: Sequence[Segment]) -> Iterator[_Piece]:
    """Yield the trunk of each family of rows, and its branches."""
    for family in _families(segments):
        first = family[0]
        known = len(first.path) - first.new  # tokens that an earlier family has computed
        trunk = known if len(family) == 1 else min(_common(a.path, b.path) for a, b in pairwise(family))
        if known < trunk:
            yield _Piece(first.path[:known], first.path[known:trunk], trunk - known)
        for segment in family:
            new = min(segment.new, len(segment.path) - trunk)
            if new:
                yield _Piece(family[0].path[:trunk], segment.path[trunk:], new)


def _families(segments: Sequence[Segment]) -> Iterator[list[Segment]]:
    """Yield families of sorted segments, split where the prefix shared with earlier ones drops by more than half."""
    family: list[Segment] = []
    trunk = 0
    for segment in segments:
        common = _common(family[-1].path, segment.path) if family else 0
        if family and common >= _SHORTEST_TRUNK and (len(family) == 1 or 2 * common >= trunk):
            trunk = common if len(family) == 1 else min(trunk, common)
            family.append(segment)
            continue
        if family:
            yield family
        family = [segment]
    if family:
        yield family


def _common(a: IntArray, b: IntArray) -> int:
    width = min(len(a), len(b))
    differs = a[:width] != b[:width]
    return int(differs.argmax()) if differs.any() else width


def _similar(pieces: Iterator[_Piece]) -> Iterator[list[_Piece]]:
    """Yield groups of pieces of one trunk, such that padding at most doubles the work."""
    for _, family in groupby(pieces, key=lambda piece: (len(piece.trunk), *piece.trunk[:1], *piece.trunk[-1:])):
        group: list[_Piece] = []
        for piece in sorted(family, key=lambda piece: (piece.new, len(piece.own))):
            if group and (piece.new > 2 * group[0].new or len(piece.own) > 2 * len(group[0].own)):
                yield group
                group = []
            group.append(piece)
        yield group


class _Bucket:
    """Pieces of one trunk, padded to one shape: R pieces, Q queries, L own tokens.

    Attributes:
        places: packed places of the tokens that attend, in the order of the result.
        queries: (R * Q,) packed places of the queries, padding included.
        seen: (P + R * L,) packed places of the tokens that all see, and of the own tokens, padding included.
    """

    def __init__(self, pieces: Sequence[_Piece], dtype: torch.dtype, device: torch.device) -> None:
        queries, length = max(piece.new for piece in pieces), max(len(piece.own) for piece in pieces)
        query = np.zeros((len(pieces), queries), np.int64)
        own = np.zeros((len(pieces), length), np.int64)
        visible = np.ones(
            (len(pieces), queries), np.int64
        )  # own tokens; padding sees one token, so that softmax stays finite
        for row, piece in enumerate(pieces):
            query[row, : piece.new] = piece.own[-piece.new :]
            own[row, : len(piece.own)] = piece.own
            visible[row, : piece.new] = np.arange(len(piece.own) - piece.new, len(piece.own)) + 1
        real = np.flatnonzero(np.arange(queries) < np.array([[piece.new] for piece in pieces]))
        self.places: IntArray = query.reshape(-1)[real]
        self.queries = query.reshape(-1)
        self.seen = np.concatenate([pieces[0].trunk, own.reshape(-1)])
        self._trunk = len(pieces[0].trunk)
        self._shape = (len(pieces), queries, length)
        self._alone = len(pieces) == 1 and not len(pieces[0].trunk) and pieces[0].new == length
        self._real = torch.from_numpy(real).to(device) if len(real) < query.size else None
        self._visible = visible
        self._like = torch.empty(0, dtype=dtype, device=device)
        self._hidden: dict[int | None, Tensor] = {}

    def attend(self, layer: AttentionLayer, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attend.

        Args:
            layer: how it attends.
            query: (R * Q, H, D).
            keys: (P + R * L, KV, D).
            values: likewise.

        Returns:
            (number of places, H, D).
        """
        rows, queries, length = self._shape
        heads, width = query.shape[1:]
        key_heads = keys.shape[1]
        if self._alone and layer.sinks_H is None and layer.cap is None:
            return self._causal(layer, query, keys, values)
        own_keys, own_values = (
            part[self._trunk :].view(rows, length, key_heads, width).transpose(1, 2).reshape(-1, length, width)
            for part in (keys, values)
        )
        out = attend(
            layer,
            to_key_heads(query.view(rows, queries, heads, width), key_heads),
            self._prefix(layer, keys[: self._trunk], values[: self._trunk], heads // key_heads),
            own_keys,
            own_values,
            for_heads(self._own_bias(layer.window), key_heads, heads),
        )
        padded = from_key_heads(out, queries).reshape(rows * queries, heads, width)
        return padded if self._real is None else padded.index_select(0, self._real)

    def _own_bias(self, window: int | None) -> Tensor:
        if window not in self._hidden:
            hidden = hidden_own(self._visible, self._shape[2], window)
            self._hidden[window] = bias(hidden, self._like.dtype, self._like.device)
        return self._hidden[window]

    def _prefix(self, layer: AttentionLayer, key_PKD: Tensor, value_PKD: Tensor, shares: int) -> SeenPrefix | None:
        """Return the part of the trunk that is seen; None if none is."""
        length = self._trunk
        first, hidden = hidden_before(length + self._visible - 1, length, layer.window)
        if first == length:
            return None
        keys, values = (part[first:].transpose(0, 1).contiguous() for part in (key_PKD, value_PKD))
        return SeenPrefix(keys, values, prefix_bias(hidden, shares, self._like))

    def _causal(self, layer: AttentionLayer, query_QHD: Tensor, key_QKD: Tensor, value_QKD: Tensor) -> Tensor:
        """Attend as a single sequence, without storing the weights, which would be many for a long one."""
        query, key, value = (part.transpose(0, 1)[None] for part in (query_QHD, key_QKD, value_QKD))
        mask = None if layer.window is None else self._own_bias(layer.window)[None]
        out: Tensor = scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=layer.scale, enable_gqa=True
        )
        return out[0].transpose(0, 1)
