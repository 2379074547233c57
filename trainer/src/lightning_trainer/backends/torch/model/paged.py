"""Attention of packed tokens to the blocks of a cache: each block is read once, for all tokens that see it.

A pair is a token and a block that it sees. Blocks are grouped into classes by the number of tokens that see them, at
most twice as many for one block as for another, and each class is one batched matrix product. A step therefore takes a
number of kernels that does not depend on the number of sequences, and time that grows with the number of pairs. The
softmax over all blocks of a token is the sum of its pairs' exponentials, as in FlashDecoding.

Axes: T tokens, P pairs of all classes (of one class, U blocks times M tokens), H query heads, K key heads, G = H / K, D
head width, B tokens of a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_trainer.backends.torch.model.attention import AttentionLayer
from lightning_trainer.backends.torch.model.cache import BLOCK, SlotCache

Integers = NDArray[np.int64]

# a product over a range of blocks is cheaper than a copy of the needed ones, up to this factor in their number
_WORTH_GATHERING = 1.4


class PagedAttention:
    """The part of a cache that the tokens of a step see. All their own keys and values must be stored in it."""

    def __init__(self, cache: SlotCache, slots_T: Integers, positions_T: Integers) -> None:
        self._cache, self._slots_T, self._positions_T = cache, slots_T, positions_T
        self._sights: dict[int | None, _Sight] = {}

    def attend(self, layer: AttentionLayer, query_THD: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attend in one layer.

        Args:
            layer: how it attends.
            query_THD: (T, H, D) queries.
            keys: (blocks, K, B, D) of the layer.
            values: (blocks, K, D, B) of the layer.

        Returns:
            (T, H, D).
        """
        if layer.window not in self._sights:  # layers with the same window see the same
            self._sights[layer.window] = _look(self._cache, self._slots_T, self._positions_T, layer.window)
        return self._sights[layer.window].attend(layer, query_THD, keys, values)


@dataclass(frozen=True, slots=True, eq=False)
class _Class:
    """Blocks that about the same number of tokens see.

    Attributes:
        blocks: which, as a range or by number.
        members: M, the most tokens that see one of them; those with fewer are padded.
        pairs: the range of these among all pairs.
        query_UM: (U * M,) the token of each pair.
    """

    blocks: slice | Tensor
    members: int
    pairs: slice
    query_UM: Tensor

    def scores(self, query_THD: Tensor, keys: Tensor) -> Tensor:
        """(P, K, G, B) products of queries and keys."""
        heads, width = query_THD.shape[1:]
        key_heads = keys.shape[1]
        query = query_THD[self.query_UM].view(-1, self.members, key_heads, heads // key_heads, width)
        products = _multiply(query, keys[self.blocks].transpose(2, 3))
        return products.reshape(-1, key_heads, heads // key_heads, BLOCK)

    def sums(self, weights_PKGB: Tensor, values: Tensor) -> Tensor:
        """(P, K, G, D) weighted sums of values."""
        weights = weights_PKGB[self.pairs]
        sums = _multiply(weights.view(-1, self.members, *weights.shape[1:]), values[self.blocks].transpose(2, 3))
        return sums.reshape(-1, *sums.shape[2:])


def _multiply(left_UMKGI: Tensor, right_UKIJ: Tensor) -> Tensor:
    """(U, M, K, G, J) products, with all rows for a block's key head in one product."""
    blocks, members, key_heads, shares, inner = left_UMKGI.shape
    left = left_UMKGI.transpose(1, 2).reshape(blocks * key_heads, members * shares, inner)
    out = torch.bmm(left, right_UKIJ.flatten(0, 1))
    return out.view(blocks, key_heads, members, shares, -1).transpose(1, 2)


class _Sight:
    """Pairs of tokens and blocks, class by class.

    Args:
        classes: of blocks.
        token_P: (P,) the token of each pair; T for padding.
        bias_PB: (P, B) 0 if the token sees a key, otherwise minus infinity.
        tokens: T.
    """

    def __init__(self, classes: list[_Class], token_P: Tensor, bias_PB: Tensor, tokens: int) -> None:
        self._classes, self._token_P, self._bias_P11B = classes, token_P, bias_PB[:, None, None]
        self._tokens = tokens

    def attend(self, layer: AttentionLayer, query_THD: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        products = _concatenate([each.scores(query_THD, keys) for each in self._classes])
        if layer.cap is None:
            scores = torch.add(self._bias_P11B, products, alpha=layer.scale)
        else:
            scores = layer.scores(products.float()) + self._bias_P11B
        highest = self._highest(scores.amax(-1), layer.sinks_H)
        weights = scores.sub_(highest[self._token_P][..., None]).exp_()
        total = self._add_up(weights.sum(-1))
        if layer.sinks_H is not None:
            total += torch.exp(layer.sinks_H.float().view(highest.shape[1:]) - highest)
        weights = weights.to(values.dtype)
        out = self._add_up(_concatenate([each.sums(weights, values) for each in self._classes]).float())
        mean = out[: self._tokens] / total[: self._tokens, ..., None]
        return mean.flatten(1, 2).to(query_THD.dtype)

    def _highest(self, highest_PKG: Tensor, sinks_H: Tensor | None) -> Tensor:
        """(T + 1, K, G) the highest score of each token."""
        shape = (self._tokens + 1, *highest_PKG.shape[1:])
        least = torch.full(shape, torch.finfo(torch.float32).min, device=highest_PKG.device)
        if sinks_H is not None:
            least[:] = sinks_H.view(shape[1:])
        return least.scatter_reduce_(0, self._token_P[:, None, None].expand_as(highest_PKG), highest_PKG, "amax")

    def _add_up(self, parts: Tensor) -> Tensor:
        """(T + 1, ...) the sums over each token's pairs, always in the same order."""
        sums = torch.zeros((self._tokens + 1, *parts.shape[1:]), device=parts.device)
        if parts.is_cuda:  # on which `index_add_` adds in any order
            return sums.index_put_((self._token_P,), parts, accumulate=True)
        return sums.index_add_(0, self._token_P, parts)


def _concatenate(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _look(cache: SlotCache, slots_T: Integers, positions_T: Integers, window: int | None) -> _Sight:
    """Return the pairs of blocks and tokens of these slots and positions, in layers with this window."""
    oldest_T = np.zeros_like(positions_T) if window is None else np.maximum(positions_T - window + 1, 0)
    counts_T = positions_T // BLOCK - oldest_T // BLOCK + 1
    token_P = np.repeat(np.arange(len(slots_T)), counts_T)
    before_P = np.repeat(np.cumsum(counts_T) - counts_T, counts_T)
    place_P = np.arange(len(token_P)) - before_P + oldest_T[token_P] // BLOCK
    block_P = cache.blocks[slots_T[token_P], place_P]
    token_P = np.append(token_P, len(slots_T))  # and a pair for padding
    first_P = np.append(oldest_T[token_P[:-1]] - place_P * BLOCK, 0)
    last_P = np.append(positions_T[token_P[:-1]] - place_P * BLOCK, BLOCK)
    device, classes, chosen, end = cache.shape.device, [], [], 0
    for blocks, pair_UM in _classes(block_P):
        start, end = end, end + pair_UM.size
        query = token_P[pair_UM.reshape(-1)] % len(slots_T)
        taken = blocks if isinstance(blocks, slice) else torch.from_numpy(blocks).to(device)
        classes.append(_Class(taken, pair_UM.shape[1], slice(start, end), torch.from_numpy(query).to(device)))
        chosen.append(pair_UM.reshape(-1))
    order = np.concatenate(chosen)
    first, last = (torch.from_numpy(each[order]).to(device)[:, None] for each in (first_P, last_P))
    key_B = torch.arange(BLOCK, device=device)
    bias_PB = torch.zeros((len(order), BLOCK), device=device)
    bias_PB.masked_fill_((key_B < first) | (key_B > last), float("-inf"))
    return _Sight(classes, torch.from_numpy(token_P[order]).to(device), bias_PB, len(slots_T))


def _classes(block_P: Integers) -> Iterator[tuple[slice | Integers, Integers]]:
    """Group blocks into classes by the number of their pairs, up to each power of 2.

    Yields:
        the blocks, and (U, M) the pairs of each, padded with the number after the last pair.
    """
    order = np.argsort(block_P, kind="stable")
    block_U, start_U, count_U = np.unique(block_P[order], return_index=True, return_counts=True)
    size_U = np.ceil(np.log2(count_U)).astype(np.int64)
    for size in np.unique(size_U):
        block, start, count = (each[size_U == size] for each in (block_U, start_U, count_U))
        range_ = slice(int(block[0]), int(block[-1]) + 1)
        as_range = range_.stop - range_.start <= _WORTH_GATHERING * len(block)
        line = block - range_.start if as_range else np.arange(len(block))
        pair_UM = np.full((line[-1] + 1, count.max()), len(block_P))
        within = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
        pair_UM[np.repeat(line, count), within] = order[np.repeat(start, count) + within]
        yield (range_ if as_range else block), pair_UM
