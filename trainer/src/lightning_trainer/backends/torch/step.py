"""One forward pass of a lane: which tokens are computed, and how they attend to a `SlotCache`.

Axes: N packed tokens, R slots of a run, Q queries of a slot, H query heads, K key heads, D head width, P tokens of a
prefix, L tokens that a slot holds itself. The H / K query heads of a key head are that many more queries of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_trainer.backends.torch.cache import SHORTEST_PREFIX, CacheShape, Prefix, SlotCache

SHORT = SHORTEST_PREFIX  # most tokens that are computed into a tail at once; more go into the slot's prefix


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next tokens of one slot's sequence, computed in this step: `length` of them."""

    slot: int
    length: int


class StepPlan:
    """A step over some slots: `attention.AttentionPlan`.

    Few tokens of many slots go in runs of neighbouring slots, one product for a whole run. A long chunk goes alone, and
    its keys and values are kept aside; `finish` puts them into the slot's prefix.
    """

    def __init__(self, cache: SlotCache, chunks: Sequence[Chunk]) -> None:
        """Lay out the step.

        Args:
            cache: where keys and values are; tails have room for what comes.
            chunks: what to compute, at most one for each slot.
        """
        self._cache = cache
        device = cache.shape.device
        short = sorted((c for c in chunks if c.length <= SHORT), key=lambda chunk: chunk.slot)
        self._long = [_Long(cache, chunk) for chunk in chunks if chunk.length > SHORT]
        self.chunks = [*short, *(long.chunk for long in self._long)]
        slots = np.repeat([c.slot for c in self.chunks], [c.length for c in self.chunks])
        positions = np.concatenate([np.arange(c.length) + cache.computed[c.slot] for c in self.chunks])
        starts = np.array([cache.start(slot) for slot in range(cache.slots)])
        stored = sum(c.length for c in short)
        self.tokens = torch.from_numpy(cache.tokens[slots, positions].astype(np.int64)).to(device)
        self.positions = torch.from_numpy(positions).to(device)
        self._stored = stored
        self._slots = torch.from_numpy(slots[:stored]).to(device)
        self._places = torch.from_numpy((positions - starts[slots])[:stored]).to(device)
        self._runs = [_Run(cache, run) for run in _runs(short)]

    def attend(self, layer: int, query_NHD: Tensor, key_NKD: Tensor, value_NKD: Tensor, scale: float) -> Tensor:
        """Store what goes into tails, then attend run by run and chunk by chunk."""
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        if self._stored:
            keys[self._slots, :, self._places] = key_NKD[: self._stored]
            values[self._slots, :, self._places] = value_NKD[: self._stored]
        parts, first = [], 0
        for run in self._runs:
            parts.append(run.attend(layer, query_NHD[first : first + run.tokens], keys, values, scale))
            first += run.tokens
        for long in self._long:
            own = slice(first, first + long.chunk.length)
            parts.append(long.attend(layer, query_NHD[own], key_NKD[own], value_NKD[own], scale))
            first += long.chunk.length
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def finish(self) -> None:
        """Count what was computed."""
        for long in self._long:
            self._cache.extend_prefix(long.chunk.slot, torch.stack(long.keys), torch.stack(long.values))
        for chunk in self.chunks:
            if chunk.length <= SHORT:
                self._cache.computed[chunk.slot] += chunk.length


def _runs(short: Sequence[Chunk]) -> Iterator[list[Chunk]]:
    """Split chunks at gaps between slots, and between those that decode and those that begin."""
    for _, run in groupby(enumerate(short), key=lambda item: (item[1].slot - item[0], item[1].length == 1)):
        yield [chunk for _, chunk in run]


class _Run:
    """Neighbouring slots, each with its prefix and its tail."""

    def __init__(self, cache: SlotCache, chunks: Sequence[Chunk]) -> None:
        self.tokens = sum(chunk.length for chunk in chunks)
        self._first, self._rows = chunks[0].slot, len(chunks)
        self._queries = max(chunk.length for chunk in chunks)
        self._spread, self._real = self._padding(chunks, cache.shape.device)
        tails = np.array([cache.tail(chunk.slot) for chunk in chunks])
        self._length = cache.room
        seen_RQ = tails[:, None] + np.minimum(np.arange(self._queries) + 1, [[chunk.length] for chunk in chunks])
        self._bias = _bias(np.arange(self._length) >= seen_RQ[..., None], cache.shape)
        self._groups = list(_by_prefix([cache.prefixes[chunk.slot] for chunk in chunks], cache.shape.device))
        self._expanded: Tensor | None = None

    def _padding(self, chunks: Sequence[Chunk], device: torch.device) -> tuple[Tensor | None, Tensor | None]:
        """Index of the token behind each query, and of the queries that are tokens; None where they are the same."""
        if self.tokens == self._rows * self._queries:
            return None, None
        lengths = np.array([chunk.length for chunk in chunks])
        within = np.minimum(np.arange(self._queries), lengths[:, None] - 1)
        spread = (np.cumsum(lengths) - lengths)[:, None] + within
        real = np.flatnonzero(np.arange(self._queries) < lengths[:, None])
        return torch.from_numpy(spread.reshape(-1)).to(device), torch.from_numpy(real).to(device)

    def attend(self, layer: int, query_NHD: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        heads, width = query_NHD.shape[1:]
        own = slice(self._first, self._first + self._rows)
        query = query_NHD if self._spread is None else query_NHD[self._spread]
        query_RKQD = _to_key_heads(query.reshape(self._rows, self._queries, heads, width), keys.shape[1])
        if self._expanded is None:
            self._expanded = _for_heads(self._bias, keys.shape[1], heads)
        prefixes = [(rows, prefix.keys[layer], prefix.values[layer]) for rows, prefix in self._groups]
        out = _attend(query_RKQD, prefixes, keys[own].flatten(0, 1), values[own].flatten(0, 1), self._expanded, scale)
        out_NHD = _from_key_heads(out, self._queries).reshape(self._rows * self._queries, heads, width)
        return out_NHD if self._real is None else out_NHD[self._real]


class _Long:
    """A long chunk of one slot: attends to the slot's prefix and, causally, to itself."""

    def __init__(self, cache: SlotCache, chunk: Chunk) -> None:
        self.chunk = chunk
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        if cache.tail(chunk.slot):
            cache.seal(chunk.slot, int(cache.computed[chunk.slot]))
        self._prefix = cache.prefixes[chunk.slot]
        order = np.arange(chunk.length)
        self._bias = _bias((order > order[:, None])[None], cache.shape)
        self._expanded: Tensor | None = None

    def attend(self, layer: int, query_NHD: Tensor, key_NKD: Tensor, value_NKD: Tensor, scale: float) -> Tensor:
        length, heads, width = query_NHD.shape
        keys, values = key_NKD.transpose(0, 1).contiguous(), value_NKD.transpose(0, 1).contiguous()
        self.keys.append(keys)
        self.values.append(values)
        if self._expanded is None:
            self._expanded = _for_heads(self._bias, len(keys), heads)
        prefix = self._prefix
        prefixes = [] if prefix is None else [(None, prefix.keys[layer], prefix.values[layer])]
        query_RKQD = _to_key_heads(query_NHD.reshape(1, length, heads, width), len(keys))
        out = _attend(query_RKQD, prefixes, keys, values, self._expanded, scale)
        return _from_key_heads(out, length).reshape(length, heads, width)


def _by_prefix(prefixes: Sequence[Prefix | None], device: torch.device) -> Iterator[tuple[Tensor | None, Prefix]]:
    """Give each prefix with the rows that have it; None for all rows."""
    for prefix in {id(prefix): prefix for prefix in prefixes if prefix is not None}.values():
        rows = [row for row, own in enumerate(prefixes) if own is prefix]
        yield None if len(rows) == len(prefixes) else torch.tensor(rows, device=device), prefix


def _attend(  # noqa: PLR0917  a formula's letters
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
        out = out + more if which is None else out.index_add_(0, which, more)
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


def _to_key_heads(query_RQHD: Tensor, key_heads: int) -> Tensor:
    """(R, Q, H, D) to (R, K, H / K * Q, D)."""
    rows, queries, heads, width = query_RQHD.shape
    split = query_RQHD.view(rows, queries, key_heads, heads // key_heads, width)
    return split.permute(0, 2, 3, 1, 4).reshape(rows, key_heads, -1, width)


def _from_key_heads(out_RKQD: Tensor, queries: int) -> Tensor:
    """(R, K, H / K * Q, D) to (R, Q, K, H / K, D)."""
    rows, key_heads, _, width = out_RKQD.shape
    return out_RKQD.view(rows, key_heads, -1, queries, width).permute(0, 3, 1, 2, 4)


def _bias(hidden_RQL: NDArray[np.bool_], shape: CacheShape) -> Tensor:
    """(R, Q, L): 0 where a token is seen, else half the lowest number, to which a score can be added."""
    bias = torch.zeros(hidden_RQL.shape, dtype=shape.dtype)
    return bias.masked_fill_(torch.from_numpy(hidden_RQL), torch.finfo(shape.dtype).min / 2).to(shape.device)


def _for_heads(bias_RQL: Tensor, key_heads: int, heads: int) -> Tensor:
    """(R, Q, L) to (R * K, H / K * Q, L), as `_to_key_heads` orders queries."""
    rows, queries, length = bias_RQL.shape
    expanded = bias_RQL[:, None, None].expand(rows, key_heads, heads // key_heads, queries, length)
    return expanded.reshape(rows * key_heads, -1, length)
