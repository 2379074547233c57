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
from torch import Tensor

from lightning_trainer.backends.torch.generate.cache import SHORTEST_PREFIX, Prefix, SlotCache
from lightning_trainer.backends.torch.model.attention import attend, bias, for_heads, from_key_heads, to_key_heads

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
        self.owners = cache.owners[slots]  # (N,) adapter of each token
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
        self._bias = bias(np.arange(self._length) >= seen_RQ[..., None], cache.shape.dtype, cache.shape.device)
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
        query_RKQD = to_key_heads(query.reshape(self._rows, self._queries, heads, width), keys.shape[1])
        if self._expanded is None:
            self._expanded = for_heads(self._bias, keys.shape[1], heads)
        prefixes = [(rows, prefix.keys[layer], prefix.values[layer]) for rows, prefix in self._groups]
        out = attend(query_RKQD, prefixes, keys[own].flatten(0, 1), values[own].flatten(0, 1), self._expanded, scale)
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
        self._prefix = cache.prefixes[chunk.slot]
        order = np.arange(chunk.length)
        self._bias = bias((order > order[:, None])[None], cache.shape.dtype, cache.shape.device)
        self._expanded: Tensor | None = None

    def attend(self, layer: int, query_NHD: Tensor, key_NKD: Tensor, value_NKD: Tensor, scale: float) -> Tensor:
        length, heads, width = query_NHD.shape
        keys, values = key_NKD.transpose(0, 1).contiguous(), value_NKD.transpose(0, 1).contiguous()
        self.keys.append(keys)
        self.values.append(values)
        if self._expanded is None:
            self._expanded = for_heads(self._bias, len(keys), heads)
        prefix = self._prefix
        prefixes = [] if prefix is None else [(None, prefix.keys[layer], prefix.values[layer])]
        query_RKQD = to_key_heads(query_NHD.reshape(1, length, heads, width), len(keys))
        out = attend(query_RKQD, prefixes, keys, values, self._expanded, scale)
        return from_key_heads(out, length).reshape(length, heads, width)


def _by_prefix(prefixes: Sequence[Prefix | None], device: torch.device) -> Iterator[tuple[Tensor | None, Prefix]]:
    """Return each prefix with the rows that have it; None for all rows."""
    for prefix in {id(prefix): prefix for prefix in prefixes if prefix is not None}.values():
        rows = [row for row, own in enumerate(prefixes) if own is prefix]
        yield None if len(rows) == len(prefixes) else torch.tensor(rows, device=device), prefix
