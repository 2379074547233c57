"""One forward pass of the batcher: which tokens are computed, and how they attend to a `SlotCache`.

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
from torch.nn.functional import pad

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
from lightning_trainer.backends.torch.model.cache import SHORTEST_PREFIX, Prefix, SlotCache
from lightning_trainer.backends.torch.model.recurrent import Layer, Memory, in_hand

SHORT = SHORTEST_PREFIX  # most tokens that are computed into a tail at once; more go into the slot's prefix


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next tokens of one slot's sequence, computed in this step: `length` of them."""

    slot: int
    length: int


class StepPlan:
    """A step over some slots: `attention.AttentionPlan`, `recurrent.RecurrentPlan`.

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
        self.owners = cache.owners[slots]  # (N,) adapter of each token
        self._stored = stored
        self._slots = torch.from_numpy(slots[:stored]).to(device)
        self._places = torch.from_numpy((positions - starts[slots])[:stored]).to(device)
        self._runs = [_Run(cache, run) for run in _runs(short)]

    def attend(self, layer: AttentionLayer, query_NHD: Tensor, key_NKD: Tensor, value_NKD: Tensor) -> Tensor:
        """Store what goes into tails, then attend run by run and chunk by chunk.

        Where a layer has fewer or narrower heads than the cache, heads are repeated, and widened by zeros.
        """
        width, shape = query_NHD.shape[-1], self._cache.shape
        if key_NKD.shape[1:] != (shape.key_heads, shape.head_width):
            query_NHD = pad(query_NHD, (0, shape.head_width - width))
            key_NKD, value_NKD = (
                pad(part, (0, shape.head_width - width)).repeat_interleave(shape.key_heads // part.shape[1], 1)
                for part in (key_NKD, value_NKD)
            )
        keys, values = self._cache.keys[layer.number], self._cache.values[layer.number]
        if self._stored:
            keys[self._slots, :, self._places] = key_NKD[: self._stored]
            values[self._slots, :, self._places] = value_NKD[: self._stored]
        parts, first = [], 0
        for run in self._runs:
            parts.append(run.attend(layer, query_NHD[first : first + run.tokens], keys, values))
            first += run.tokens
        for long in self._long:
            own = slice(first, first + long.chunk.length)
            parts.append(long.attend(layer, query_NHD[own], key_NKD[own], value_NKD[own]))
            first += long.chunk.length
        return (parts[0] if len(parts) == 1 else torch.cat(parts))[..., :width]

    def recur(self, number: int, layer: Layer, hidden_NW: Tensor) -> Tensor:
        """Run a recurrent layer, neighbouring slots with as many tokens together."""
        memories = self._cache.memories
        if memories is None:
            raise RuntimeError("this cache was made for a model without recurrent layers")
        parts, first = [], 0
        for slots, length in _alike(self.chunks):
            own = slice(first, first + (slots.stop - slots.start) * length)
            memory = Memory(memories.of(number, slots))
            with in_hand(own):
                out = layer(hidden_NW[own].view(-1, length, hidden_NW.shape[-1]), memory)
            memories.put(number, slots, memory.after)
            parts.append(out.flatten(0, 1))
            first = own.stop
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def finish(self) -> None:
        """Count what was computed."""
        for long in self._long:
            self._cache.extend_prefix(long.chunk.slot, torch.stack(long.keys), torch.stack(long.values))
        for chunk in self.chunks:
            if chunk.length <= SHORT:
                self._cache.computed[chunk.slot] += chunk.length
            if self._cache.memories is not None:
                self._cache.memories.have_read(chunk.slot, int(self._cache.computed[chunk.slot]))


def _alike(chunks: Sequence[Chunk]) -> Iterator[tuple[slice, int]]:
    """Return runs of neighbouring slots whose chunks are as long: the slots, and the length."""
    for (_, length), run in groupby(enumerate(chunks), key=lambda item: (item[1].slot - item[0], item[1].length)):
        slots = [chunk.slot for _, chunk in run]
        yield slice(slots[0], slots[-1] + 1), length


def _runs(short: Sequence[Chunk]) -> Iterator[list[Chunk]]:
    """Split chunks at gaps between slots, and between those that decode and those that begin."""
    for _, run in groupby(enumerate(short), key=lambda item: (item[1].slot - item[0], item[1].length == 1)):
        yield [chunk for _, chunk in run]


@dataclass(frozen=True, slots=True, eq=False)
class _PrefixPart:
    """What rows see of a prefix: its tokens from `first` on, where `bias` allows."""

    rows: Tensor | None
    prefix: Prefix
    first: int
    bias: Tensor | None

    def of(self, layer: AttentionLayer) -> SeenPrefix:
        keys, values = self.prefix.keys[layer.number], self.prefix.values[layer.number]
        return SeenPrefix(self.rows, keys[:, self.first :], values[:, self.first :], self.bias)


class _Sight:
    """What the queries of rows see, for layers of each window; made when the first of them asks.

    Args:
        prefixes: of each row.
        starts: (R,) number of tokens before a row's own.
        seen_RQ: how many of its own tokens a query sees without a window, itself the last.
        length: of the rows' own tokens, L.
        like: has the format and device of what is made.
    """

    def __init__(
        self,
        prefixes: Sequence[Prefix | None],
        starts: NDArray[np.int64],
        seen_RQ: NDArray[np.int64],
        length: int,
        like: Tensor,
    ) -> None:
        self._prefixes, self._seen_RQ, self._length, self._like = prefixes, seen_RQ, length, like
        self._positions_RQ = starts[:, None] + seen_RQ - 1
        self._made: dict[tuple[int | None, int], tuple[Tensor, list[_PrefixPart]]] = {}

    def of(self, layer: AttentionLayer, key_heads: int, heads: int) -> tuple[Tensor, list[SeenPrefix]]:
        """Return the bias of own tokens, and what is seen of prefixes."""
        kind = (layer.window, heads)
        if kind not in self._made:
            hidden = hidden_own(self._seen_RQ, self._length, layer.window)
            own = for_heads(bias(hidden, self._like.dtype, self._like.device), key_heads, heads)
            self._made[kind] = own, list(self._parts(layer.window, heads // key_heads))
        own, parts = self._made[kind]
        return own, [part.of(layer) for part in parts]

    def _parts(self, window: int | None, shares: int) -> Iterator[_PrefixPart]:
        """Return each prefix with the rows that have it and see any of it."""
        for prefix in {id(prefix): prefix for prefix in self._prefixes if prefix is not None}.values():
            rows = [row for row, own in enumerate(self._prefixes) if own is prefix]
            first, hidden = hidden_before(self._positions_RQ[rows], len(prefix), window)
            if first < len(prefix):
                which = None if len(rows) == len(self._prefixes) else torch.tensor(rows, device=self._like.device)
                yield _PrefixPart(which, prefix, first, prefix_bias(hidden, shares, self._like))


class _Run:
    """Neighbouring slots, each with its prefix and its tail."""

    def __init__(self, cache: SlotCache, chunks: Sequence[Chunk]) -> None:
        self.tokens = sum(chunk.length for chunk in chunks)
        self._first, self._rows = chunks[0].slot, len(chunks)
        self._queries = max(chunk.length for chunk in chunks)
        self._spread, self._real = self._padding(chunks, cache.shape.device)
        tails = np.array([cache.tail(chunk.slot) for chunk in chunks])
        seen_RQ = tails[:, None] + np.minimum(np.arange(self._queries) + 1, [[chunk.length] for chunk in chunks])
        starts = np.array([cache.start(chunk.slot) for chunk in chunks])
        self._sight = _Sight([cache.prefixes[c.slot] for c in chunks], starts, seen_RQ, cache.room, cache.keys)

    def _padding(self, chunks: Sequence[Chunk], device: torch.device) -> tuple[Tensor | None, Tensor | None]:
        """Index of the token behind each query, and of the queries that are tokens; None where they are the same."""
        if self.tokens == self._rows * self._queries:
            return None, None
        lengths = np.array([chunk.length for chunk in chunks])
        within = np.minimum(np.arange(self._queries), lengths[:, None] - 1)
        spread = (np.cumsum(lengths) - lengths)[:, None] + within
        real = np.flatnonzero(np.arange(self._queries) < lengths[:, None])
        return torch.from_numpy(spread.reshape(-1)).to(device), torch.from_numpy(real).to(device)

    def attend(self, layer: AttentionLayer, query_NHD: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        heads, width = query_NHD.shape[1:]
        own = slice(self._first, self._first + self._rows)
        query = query_NHD if self._spread is None else query_NHD[self._spread]
        query_RKQD = to_key_heads(query.reshape(self._rows, self._queries, heads, width), keys.shape[1])
        hidden, prefixes = self._sight.of(layer, keys.shape[1], heads)
        out = attend(layer, query_RKQD, prefixes, keys[own].flatten(0, 1), values[own].flatten(0, 1), hidden)
        out_NHD = from_key_heads(out, self._queries).reshape(self._rows * self._queries, heads, width)
        return out_NHD if self._real is None else out_NHD[self._real]


class _Long:
    """A long chunk of one slot: attends to the slot's prefix and, causally, to itself."""

    def __init__(self, cache: SlotCache, chunk: Chunk) -> None:
        self.chunk = chunk
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        if cache.tail(chunk.slot):
            cache.seal(chunk.slot, int(cache.computed[chunk.slot]))
        seen = np.arange(chunk.length)[None] + 1
        start = np.array([cache.start(chunk.slot)])
        self._sight = _Sight([cache.prefixes[chunk.slot]], start, seen, chunk.length, cache.keys)

    def attend(self, layer: AttentionLayer, query_NHD: Tensor, key_NKD: Tensor, value_NKD: Tensor) -> Tensor:
        length, heads, width = query_NHD.shape
        keys, values = key_NKD.transpose(0, 1).contiguous(), value_NKD.transpose(0, 1).contiguous()
        self.keys.append(keys)
        self.values.append(values)
        hidden, prefixes = self._sight.of(layer, len(keys), heads)
        query_RKQD = to_key_heads(query_NHD.reshape(1, length, heads, width), len(keys))
        out = attend(layer, query_RKQD, prefixes, keys, values, hidden)
        return from_key_heads(out, length).reshape(length, heads, width)
