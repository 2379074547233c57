"""The key-value cache of one lane: slots of one preallocated tensor, and the tokens that each slot holds.

Axes: Y layers, S slots, K key heads, D head width, L tokens. Keys are stored with tokens last, which is how `attend`
wants them. Slots keep their content after a request has ended, so that a later prompt can copy what it shares.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_trainer.backends.torch.attention import attend

_BLOCK = 64  # lengths are rounded up to it: few matrix shapes, so that oneDNN seldom has to make a new kernel


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What a model needs of a cache."""

    layers: int
    key_heads: int
    head_width: int
    dtype: torch.dtype
    device: torch.device


class SlotCache:
    """Keys and values of S sequences of at most `max_tokens` tokens; memory grows with the longest one."""

    def __init__(self, shape: CacheShape, slots: int, max_tokens: int) -> None:
        self.shape, self.slots, self.max_tokens = shape, slots, max_tokens
        self.capacity = 0
        self.tokens_SL: NDArray[np.int32] = np.zeros((slots, max_tokens), np.int32)
        self.planned_S: NDArray[np.int64] = np.zeros(slots, np.int64)  # tokens that a slot has or is about to compute
        self.computed_S: NDArray[np.int64] = np.zeros(slots, np.int64)  # tokens whose keys and values are there
        self.keys_YSKDL = self.values_YSKLD = torch.empty(0)
        self.reserve(min(max_tokens, 8 * _BLOCK))

    def reserve(self, tokens: int) -> None:
        """Make room for sequences of this length."""
        if tokens <= self.capacity:
            return
        capacity = max(tokens, 2 * self.capacity)
        capacity = -(-capacity // _BLOCK) * _BLOCK
        y, k, d = self.shape.layers, self.shape.key_heads, self.shape.head_width
        place = {"dtype": self.shape.dtype, "device": self.shape.device}
        # Zeros, not empty: what a mask hides must still be finite. The pages are not touched before they are used.
        keys = torch.zeros((y, self.slots, k, d, capacity), **place)  # type: ignore[call-overload]
        values = torch.zeros((y, self.slots, k, capacity, d), **place)  # type: ignore[call-overload]
        if self.capacity:
            keys[..., : self.capacity] = self.keys_YSKDL
            values[..., : self.capacity, :] = self.values_YSKLD
        self.keys_YSKDL, self.values_YSKLD, self.capacity = keys, values, capacity

    def clear(self) -> None:
        """Forget everything: the weights have changed."""
        self.planned_S[:] = 0
        self.computed_S[:] = 0

    def shared(self, prompt: NDArray[np.int32]) -> NDArray[np.int64]:
        """(S,) number of leading tokens that each slot's content, computed or planned, shares with a prompt."""
        width = min(len(prompt), int(self.planned_S.max(initial=0)))
        if not width:
            return np.zeros(self.slots, np.int64)
        differs_SL = self.tokens_SL[:, :width] != prompt[:width]
        first_S = np.where(differs_SL.any(1), differs_SL.argmax(1), width)
        return np.minimum(first_S, self.planned_S)

    def begin(self, slot: int, prompt: NDArray[np.int32], source: int, shared: int) -> None:
        """Give a slot to a prompt of which `source` holds the first `shared` tokens."""
        self.reserve(len(prompt) + 1)
        if source != slot and shared:
            self.keys_YSKDL[:, slot, :, :, :shared] = self.keys_YSKDL[:, source, :, :, :shared]
            self.values_YSKLD[:, slot, :, :shared] = self.values_YSKLD[:, source, :, :shared]
        self.tokens_SL[slot, : len(prompt)] = prompt
        self.planned_S[slot], self.computed_S[slot] = len(prompt), shared

    def append(self, slot: int, token: int) -> None:
        """Add a sampled token to a slot's sequence; its keys and values come with the next step."""
        length = int(self.planned_S[slot])
        self.reserve(length + 1)
        self.tokens_SL[slot, length] = token
        self.planned_S[slot] = length + 1

    def keep_computed(self, slot: int) -> None:
        """Forget what was planned and will not be computed: the slot's request has ended."""
        self.planned_S[slot] = self.computed_S[slot]

    def swap(self, a: int, b: int) -> None:
        """Exchange the content of two slots."""
        length = int(max(self.computed_S[a], self.computed_S[b]))
        for store in (self.keys_YSKDL[..., :length], self.values_YSKLD[..., :length, :]):
            store[:, [a, b]] = store[:, [b, a]]
        for kept in (self.tokens_SL, self.planned_S, self.computed_S):
            kept[[a, b]] = kept[[b, a]]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one prompt that are computed in this step."""

    slot: int
    start: int
    length: int


class StepPlan:
    """One step: a token for each decoding slot, then chunks of prompts, packed in this order."""

    def __init__(self, cache: SlotCache, decoding: list[int], chunks: list[Chunk]) -> None:
        """Lay out the step.

        Args:
            cache: where keys and values are.
            decoding: slots that compute their newest token.
            chunks: prompt tokens to compute.
        """
        self._cache = cache
        self._device = cache.shape.device
        starts = cache.computed_S
        spans = [Chunk(slot, int(starts[slot]), 1) for slot in decoding] + chunks
        slots = np.repeat([c.slot for c in spans], [c.length for c in spans])
        positions = np.concatenate([np.arange(c.start, c.start + c.length) for c in spans])
        self.tokens_N = torch.from_numpy(cache.tokens_SL[slots, positions].astype(np.int64)).to(self._device)
        self.positions_N = torch.from_numpy(positions).to(self._device)
        self._slots_N = torch.from_numpy(slots).to(self._device)
        self._rows = len(decoding)
        self._span = max(decoding, default=-1) + 1
        self._decoding = None if self._rows == self._span else torch.tensor(decoding, device=self._device)
        self._decode_bias = self._bias_of_decoding(decoding, starts) if decoding else torch.empty(0)
        self._chunks = [(chunk, self._bias_of_chunk(chunk)) for chunk in chunks]

    def attend(self, layer: int, query_NHD: Tensor, key_NKD: Tensor, value_NKD: Tensor, scale: float) -> Tensor:
        """Store the new keys and values, then attend to all that the slots hold: `AttentionPlan`."""
        keys_SKDL, values_SKLD = self._cache.keys_YSKDL[layer], self._cache.values_YSKLD[layer]
        keys_SKDL[self._slots_N, :, :, self.positions_N] = key_NKD
        values_SKLD[self._slots_N, :, self.positions_N] = value_NKD
        parts, first = [], self._rows
        if self._rows:
            parts.append(self._decode(query_NHD[:first], keys_SKDL, values_SKLD, scale))
        for chunk, bias in self._chunks:
            query = query_NHD[first : first + chunk.length]
            parts.append(self._prefill(query, keys_SKDL[chunk.slot], values_SKLD[chunk.slot], bias, scale))
            first += chunk.length
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _decode(self, query_BHD: Tensor, keys_SKDL: Tensor, values_SKLD: Tensor, scale: float) -> Tensor:
        """Attend with one query for each decoding slot; the query heads of a key head are its queries."""
        heads, width = query_BHD.shape[1:]
        if self._decoding is not None:  # slots in between do not decode: give them a query that nobody reads
            spread = query_BHD.new_zeros(self._span, heads, width)
            spread[self._decoding] = query_BHD
            query_BHD = spread
        key_heads, length = keys_SKDL.shape[1], self._decode_bias.shape[-1]
        batch = self._span * key_heads
        out = attend(
            query_BHD.reshape(batch, heads // key_heads, width),
            keys_SKDL[: self._span, :, :, :length].flatten(0, 1),
            values_SKLD[: self._span, :, :length].flatten(0, 1),
            self._decode_bias,
            scale,
        ).view(self._span, heads, width)
        return out if self._decoding is None else out[self._decoding]

    @staticmethod
    def _prefill(query_QHD: Tensor, keys_KDL: Tensor, values_KLD: Tensor, bias_QL: Tensor, scale: float) -> Tensor:
        """Attend with consecutive queries of one slot."""
        queries, heads, width = query_QHD.shape
        key_heads, length = keys_KDL.shape[0], bias_QL.shape[-1]
        group = heads // key_heads
        stacked = query_QHD.reshape(queries, key_heads, group, width).permute(1, 2, 0, 3)
        bias = bias_QL.expand(group, queries, length).reshape(1, group * queries, length)
        out = attend(
            stacked.reshape(key_heads, group * queries, width),
            keys_KDL[..., :length],
            values_KLD[:, :length],
            bias,
            scale,
        )
        return out.view(key_heads, group, queries, width).permute(2, 0, 1, 3).reshape(queries, heads, width)

    def _bias_of_decoding(self, decoding: list[int], starts: NDArray[np.int64]) -> Tensor:
        """(span * K, 1, L): a slot sees its own tokens, the newest included."""
        seen = np.ones(self._span, np.int64)  # a slot that does not decode sees one token, so that softmax stays finite
        seen[decoding] = starts[decoding] + 1
        hidden = np.arange(_rounded(int(seen.max()), self._cache.capacity)) >= seen[:, None]
        return self._bias(np.repeat(hidden, self._cache.shape.key_heads, axis=0)[:, None])

    def _bias_of_chunk(self, chunk: Chunk) -> Tensor:
        """(Q, L): causal within the chunk, everything before it seen."""
        length = _rounded(chunk.start + chunk.length, self._cache.capacity)
        own = np.arange(chunk.start, chunk.start + chunk.length)
        return self._bias(np.arange(length) > own[:, None])

    def _bias(self, hidden: NDArray[np.bool_]) -> Tensor:
        lowest = torch.finfo(self._cache.shape.dtype).min / 2  # half: adding a score must not overflow to -inf
        bias = torch.zeros(hidden.shape, dtype=self._cache.shape.dtype)
        return bias.masked_fill_(torch.from_numpy(hidden), lowest).to(self._device)


def _rounded(length: int, capacity: int) -> int:
    return min(-(-length // _BLOCK) * _BLOCK, capacity)
