"""One forward pass of the batcher: which tokens are computed, and how they attend to a `SlotCache`.

Axes: N packed tokens, H query heads, K key heads, D head width, L tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_trainer.backends.torch.model.attention import (
    AttentionLayer,
    attend,
    bias,
    for_heads,
    from_key_heads,
    hidden_own,
    to_key_heads,
)
from lightning_trainer.backends.torch.model.cache import BLOCK, SlotCache
from lightning_trainer.backends.torch.model.paged import PagedAttention
from lightning_trainer.backends.torch.model.recurrent import Layer, Memory, in_hand

SHORT = BLOCK  # most tokens of a sequence that are computed together with those of others


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next tokens of one slot's sequence, computed in this step: `length` of them."""

    slot: int
    length: int


class StepPlan:
    """A step over some slots: `attention.AttentionPlan`, `recurrent.RecurrentPlan`.

    A few tokens of each of many sequences attend together; a long chunk of one sequence attends alone.
    """

    def __init__(self, cache: SlotCache, chunks: Sequence[Chunk]) -> None:
        """Plan the step.

        Args:
            cache: of keys and values.
            chunks: what to compute, at most one for each slot.
        """
        self._cache = cache
        device = cache.shape.device
        short = sorted((c for c in chunks if c.length <= SHORT), key=lambda chunk: chunk.slot)
        long = [chunk for chunk in chunks if chunk.length > SHORT]
        self.chunks = [*short, *long]
        slots = np.repeat([c.slot for c in self.chunks], [c.length for c in self.chunks])
        positions = np.concatenate([np.arange(c.length) + cache.computed[c.slot] for c in self.chunks])
        self.tokens = torch.from_numpy(cache.tokens[slots, positions].astype(np.int64)).to(device)
        self.positions = torch.from_numpy(positions).to(device)
        self.owners = cache.owners[slots]  # (N,) adapter of each token
        self._blocks = torch.from_numpy(cache.blocks[slots, positions // BLOCK]).to(device)
        self._places = torch.from_numpy(positions % BLOCK).to(device)
        together = sum(c.length for c in short)
        self._together = PagedAttention(cache, slots[:together], positions[:together]) if short else None
        self._alone = [_Long(cache, chunk) for chunk in long]
        self._lengths = [together, *(chunk.length for chunk in long)]

    def attend(self, layer: AttentionLayer, query_NHD: Tensor, key_NKD: Tensor, value_NKD: Tensor) -> Tensor:
        """Store keys and values, then attend.

        If a layer has fewer or narrower heads than the cache, heads are repeated, and padded with zeros.
        """
        width, shape = query_NHD.shape[-1], self._cache.shape
        if key_NKD.shape[1:] != (shape.key_heads, shape.head_width):
            query_NHD = pad(query_NHD, (0, shape.head_width - width))
            key_NKD, value_NKD = (
                pad(part, (0, shape.head_width - width)).repeat_interleave(shape.key_heads // part.shape[1], 1)
                for part in (key_NKD, value_NKD)
            )
        keys, values = self._cache.keys[layer.number], self._cache.values[layer.number]
        keys[self._blocks, :, self._places] = key_NKD
        values[self._blocks, :, :, self._places] = value_NKD
        first, *others = torch.split(query_NHD, self._lengths)
        parts = [] if self._together is None else [self._together.attend(layer, first, keys, values)]
        parts += [alone.attend(layer, query, keys, values) for alone, query in zip(self._alone, others, strict=True)]
        return (parts[0] if len(parts) == 1 else torch.cat(parts))[..., :width]

    def recur(self, number: int, layer: Layer, hidden_NW: Tensor) -> Tensor:
        """Run a recurrent layer, with neighbouring slots of the same number of tokens together."""
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
        """Update the number of computed tokens."""
        for chunk in self.chunks:
            self._cache.computed[chunk.slot] += chunk.length
            if self._cache.memories is not None:
                self._cache.memories.have_read(chunk.slot, int(self._cache.computed[chunk.slot]))


def _alike(chunks: Sequence[Chunk]) -> Iterator[tuple[slice, int]]:
    """Yield runs of neighbouring slots with chunks of the same length: the slots, and the length."""
    for (_, length), run in groupby(enumerate(chunks), key=lambda item: (item[1].slot - item[0], item[1].length)):
        slots = [chunk.slot for _, chunk in run]
        yield slice(slots[0], slots[-1] + 1), length


class _Long:
    """A long chunk of one slot: attends to the tokens before it and, causally, to itself."""

    def __init__(self, cache: SlotCache, chunk: Chunk) -> None:
        end = int(cache.computed[chunk.slot]) + chunk.length
        blocks = cache.blocks[chunk.slot, : -(-end // BLOCK)]
        self._blocks = torch.from_numpy(blocks).to(cache.shape.device)
        self._seen = np.arange(end - chunk.length, end)[None] + 1
        self._biases: dict[int | None, Tensor] = {}

    def attend(self, layer: AttentionLayer, query_LHD: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        length, heads, width = query_LHD.shape
        key_heads = keys.shape[1]
        keys_KLD = keys[self._blocks].transpose(0, 1).reshape(key_heads, -1, width)
        values_KDL = values[self._blocks].permute(1, 2, 0, 3).reshape(key_heads, width, -1)
        query = to_key_heads(query_LHD.reshape(1, length, heads, width), key_heads)
        hidden = self._bias(layer.window, keys_KLD, heads)
        out = attend(layer, query, None, keys_KLD, values_KDL.transpose(1, 2), hidden)
        return from_key_heads(out, length).reshape(length, heads, width)

    def _bias(self, window: int | None, keys_KLD: Tensor, heads: int) -> Tensor:
        key_heads, length = keys_KLD.shape[:2]
        if window not in self._biases:  # layers with the same window see the same
            hidden = bias(hidden_own(self._seen, length, window), keys_KLD.dtype, keys_KLD.device)
            self._biases[window] = for_heads(hidden, key_heads, heads)
        return self._biases[window]
