"""Training rows as a tree: tokens that rows have in common at their start go forward once, with gradient.

Sorted rows put shared beginnings next to each other. Each row then adds only the tokens in which it differs from the
row before, and finds the others where earlier rows put them. Attention is causal along each row's own path, so hidden
states, and the sum of gradients, are those of rows forwarded one by one.

Axes: R rows of a micro-batch, N packed tokens, P trained tokens (row after row), U distinct places that predict them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from lightning_trainer.rows import Row

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """The tokens that one row adds, and where all its tokens lie.

    Attributes:
        path: (T,) packed place of each token of the row.
        new: number of tokens at the end of the path that the row adds.
    """

    path: IntArray
    new: int


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """One micro-batch.

    Attributes:
        rows: (R,) numbers of its rows in the batch.
        tokens_N: (N,) token ids.
        positions_N: (N,) their positions in the rows.
        segments: for each row that adds tokens.
        predicts_U: (U,) packed places whose logits are needed.
        temperature_U: (U,) what their logits are divided by.
        place_P: (P,) for each trained token the index into `predicts_U` of what predicts it.
        target_P: (P,) its token id.
    """

    rows: IntArray
    tokens_N: IntArray
    positions_N: IntArray
    segments: tuple[Segment, ...]
    predicts_U: IntArray
    temperature_U: NDArray[np.float32]
    place_P: IntArray
    target_P: IntArray


def micro_batches(rows: Sequence[Row], max_tokens: int, *, share: bool = True) -> Iterator[Packed]:
    """Sort rows and pack as many as fit into each micro-batch, shared beginnings counted once.

    Args:
        rows: the batch.
        max_tokens: most packed tokens; a longer row goes alone.
        share: False packs each row whole, for comparison.
    """
    order = sorted(range(len(rows)), key=lambda r: rows[r].tokens.tolist())
    taken: list[int] = []
    size = 0
    for r in order:
        common = _common(rows[taken[-1]].tokens, rows[r].tokens) if taken and share else 0
        new = len(rows[r].tokens) - common
        if taken and size + new > max_tokens:
            yield _pack(rows, taken, share=share)
            taken, size, new = [], 0, len(rows[r].tokens)
        taken.append(r)
        size += new
    if taken:
        yield _pack(rows, taken, share=share)


def _pack(rows: Sequence[Row], taken: list[int], *, share: bool) -> Packed:
    tokens, positions, segments = [], [], []
    place, target, temperature = [], [], []
    path = np.empty(0, np.int64)
    previous = np.empty(0, np.int32)
    size = 0
    for r in taken:
        row = rows[r]
        common = _common(previous, row.tokens) if share else 0
        new = len(row.tokens) - common
        path = np.concatenate([path[:common], np.arange(size, size + new)])
        previous, size = row.tokens, size + new
        if new:
            tokens.append(row.tokens[common:])
            positions.append(np.arange(common, common + new))
            segments.append(Segment(path, new))
        trained = np.flatnonzero(row.mask)
        place.append(path[trained - 1])
        target.append(row.tokens[trained])
        temperature.append(np.full(len(trained), row.temperature))
    keys = np.stack([np.concatenate(place).astype(np.float64), np.concatenate(temperature)])
    distinct, inverse = np.unique(keys, axis=1, return_inverse=True)  # rows may draw at different temperatures
    return Packed(
        rows=np.array(taken),
        tokens_N=np.concatenate(tokens).astype(np.int64),
        positions_N=np.concatenate(positions),
        segments=tuple(segments),
        predicts_U=distinct[0].astype(np.int64),
        temperature_U=distinct[1].astype(np.float32),
        place_P=inverse.reshape(-1),
        target_P=np.concatenate(target).astype(np.int64),
    )


def _common(a: NDArray[np.int32], b: NDArray[np.int32]) -> int:
    """Number of leading tokens that two rows share."""
    width = min(len(a), len(b))
    differs = a[:width] != b[:width]
    return int(differs.argmax()) if differs.any() else width


@dataclass(frozen=True, slots=True, eq=False)
class _Bucket:
    """Segments of similar size, padded to one shape: B segments, Q new tokens, L tokens of a path."""

    queries_BQ: Tensor
    keys_BL: Tensor
    bias_BQL: Tensor
    real: Tensor  # which of the flattened B * Q queries are no padding


class TreePlan:
    """Attention along the paths of a packed micro-batch, with gradient: `attention.AttentionPlan`."""

    def __init__(self, packed: Packed, dtype: torch.dtype, device: torch.device) -> None:
        groups = _similar(packed.segments)
        self._buckets = [_bucket(group, dtype, device) for group in groups]
        computed = torch.cat([bucket.queries_BQ.flatten()[bucket.real] for bucket in self._buckets])
        self._back = computed.argsort()  # from the order of the buckets to the packed order

    def attend(self, _layer: int, query_NHD: Tensor, key_NKD: Tensor, value_NKD: Tensor, scale: float) -> Tensor:
        """Attend bucket by bucket. Keys that rows share are gathered for each row, so their gradients add up."""
        parts = [self._attend(bucket, query_NHD, key_NKD, value_NKD, scale) for bucket in self._buckets]
        return torch.cat(parts).index_select(0, self._back)

    @staticmethod
    def _attend(bucket: _Bucket, query_NHD: Tensor, key_NKD: Tensor, value_NKD: Tensor, scale: float) -> Tensor:
        (rows, queries), length = bucket.queries_BQ.shape, bucket.keys_BL.shape[1]
        heads, width = query_NHD.shape[1:]
        key_heads = key_NKD.shape[1]
        group = heads // key_heads  # the query heads of a key head become more queries of it
        query = query_NHD.index_select(0, bucket.queries_BQ.flatten()).view(rows, queries, key_heads, group, width)
        query = query.permute(0, 2, 3, 1, 4).reshape(rows, key_heads, group * queries, width)
        keys = key_NKD.index_select(0, bucket.keys_BL.flatten()).view(rows, length, key_heads, width).transpose(1, 2)
        values = value_NKD.index_select(0, bucket.keys_BL.flatten()).view(rows, length, key_heads, width)
        bias = bucket.bias_BQL.repeat(1, group, 1)[:, None]
        out = scaled_dot_product_attention(query, keys, values.transpose(1, 2), attn_mask=bias, scale=scale)
        out = out.view(rows, key_heads, group, queries, width).permute(0, 3, 1, 2, 4)
        return out.reshape(rows * queries, heads, width)[bucket.real]


def _similar(segments: Sequence[Segment]) -> list[list[Segment]]:
    """Group segments so that padding at most doubles the work."""
    groups: list[list[Segment]] = []
    for segment in sorted(segments, key=lambda s: (s.new, len(s.path))):
        first = groups[-1][0] if groups else None
        if first and segment.new <= 2 * first.new and len(segment.path) <= 2 * len(first.path):
            groups[-1].append(segment)
        else:
            groups.append([segment])
    return groups


def _bucket(group: Sequence[Segment], dtype: torch.dtype, device: torch.device) -> _Bucket:
    queries, length = max(s.new for s in group), max(len(s.path) for s in group)
    queries_BQ = np.zeros((len(group), queries), np.int64)
    keys_BL = np.zeros((len(group), length), np.int64)
    seen_BQ = np.ones((len(group), queries), np.int64)  # padding sees one key, so that softmax stays finite
    real_BQ = np.zeros((len(group), queries), np.bool_)
    for b, segment in enumerate(group):
        queries_BQ[b, : segment.new] = segment.path[-segment.new :]
        keys_BL[b, : len(segment.path)] = segment.path
        seen_BQ[b, : segment.new] = np.arange(len(segment.path) - segment.new, len(segment.path)) + 1
        real_BQ[b, : segment.new] = True
    hidden = torch.from_numpy(np.arange(length) >= seen_BQ[..., None])
    bias = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, torch.finfo(dtype).min / 2)
    return _Bucket(
        torch.from_numpy(queries_BQ).to(device),
        torch.from_numpy(keys_BL).to(device),
        bias.to(device),
        torch.from_numpy(np.flatnonzero(real_BQ)).to(device),
    )
