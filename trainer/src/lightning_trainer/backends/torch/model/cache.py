"""The key-value cache of the engine: slots with the last tokens of each sequence, after a prefix that many may share.

A sequence is a `Prefix`, kept once for all slots that begin with it, and a tail in its own slot. Attention to a shared
prefix is one product for all of them instead of one for each, and reads its keys once. Slots keep their content after
their request has ended, so that a later prompt can go on from it.

Axes: Y layers, S slots, K key heads, D head width, P tokens of a prefix, C tokens that a tail has room for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_trainer.backends.torch.model.memories import SlotMemories

IDS = NDArray[np.int32]

BLOCK = 64  # tails grow by it: few matrix shapes, so that oneDNN seldom has to make a new kernel
LONGEST_TAIL = 4 * BLOCK  # a longer one becomes a prefix, so that one long sequence does not slow down the others
SHORTEST_PREFIX = BLOCK  # a shorter one is copied: attending to it apart would cost more than it saves


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What a model needs of a cache.

    Attributes:
        layers: that attend.
        key_heads: of each.
        head_width: of each.
        dtype: of keys and values.
        device: where they are.
        recurrent: whether the model has recurrent layers besides.
    """

    layers: int
    key_heads: int
    head_width: int
    dtype: torch.dtype
    device: torch.device
    recurrent: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """Keys and values of the first tokens of one or more sequences; each layer's lie without gaps.

    Attributes:
        keys: (Y, K, P, D).
        values: (Y, K, P, D).
    """

    keys: Tensor
    values: Tensor

    def __len__(self) -> int:
        return int(self.keys.shape[2])


class SlotCache:
    """Keys and values of S sequences. Used by one thread; others may only ask what is `shared`."""

    def __init__(self, shape: CacheShape, slots: int, max_tokens: int) -> None:
        self.shape, self.slots = shape, slots
        self.tokens: IDS = np.zeros((slots, max_tokens), np.int32)
        self.planned: NDArray[np.int64] = np.zeros(slots, np.int64)  # tokens that a slot has or is about to compute
        self.computed: NDArray[np.int64] = np.zeros(slots, np.int64)  # tokens whose keys and values are there
        self.owners: NDArray[np.int64] = np.full(slots, -1)  # number of the adapter that computed what a slot holds
        self.prefixes: list[Prefix | None] = [None] * slots
        self.memories = SlotMemories(slots) if shape.recurrent else None
        self.room = 0
        self.keys = self.values = torch.empty(0)  # (Y, S, K, C, D) tails
        self.make_room(BLOCK)

    def clear(self) -> None:
        """Forget everything: the weights have changed."""
        self.planned[:] = self.computed[:] = 0
        self.prefixes = [None] * self.slots
        if self.memories is not None:
            self.memories.clear()

    def shared(self, prompt: IDS, owner: int = -1) -> NDArray[np.int64]:
        """(S,) number of leading tokens that each slot's content, computed or planned, shares with a prompt.

        Only of slots of the same adapter: another one's keys and values are not the same.
        """
        width = min(len(prompt), int(self.planned.max(initial=0)))
        if not width:
            return np.zeros(self.slots, np.int64)
        differs = self.tokens[:, :width] != prompt[:width]
        first = np.where(differs.any(1), differs.argmax(1), width)
        return np.where(self.owners == owner, np.minimum(first, self.planned), 0)

    def there(self, shared_S: NDArray[np.int64]) -> NDArray[np.int64]:
        """(S,) how many of the tokens that each slot shares with a prompt it can go on from now."""
        computed = np.minimum(shared_S, self.computed)
        return computed if self.memories is None else self.memories.there(computed)

    def coming(self, shared_S: NDArray[np.int64]) -> NDArray[np.int64]:
        """(S,) the same, when what is planned has been computed."""
        return shared_S if self.memories is None else self.memories.coming(shared_S)

    def tail(self, slot: int) -> int:
        """Number of computed tokens after the slot's prefix."""
        return int(self.computed[slot]) - self.start(slot)

    def start(self, slot: int) -> int:
        """Number of tokens in the slot's prefix."""
        prefix = self.prefixes[slot]
        return 0 if prefix is None else len(prefix)

    # A sequence's way through a slot.

    def begin(self, slot: int, prompt: IDS, source: int, shared: int, owner: int = -1) -> None:
        """Return a slot to a prompt, of an adapter, of which `source` holds the first `shared` tokens."""
        if self.memories is not None:
            self.memories.begin(slot, source, shared, len(prompt))
        if self.start(source) < shared - SHORTEST_PREFIX:
            self.seal(source, shared)
        elif SHORTEST_PREFIX <= shared < self.start(source) <= shared + BLOCK:
            self._split(source, shared)
        start, whole = self.start(source), self.prefixes[source]
        if whole is not None and SHORTEST_PREFIX <= shared < start:  # much is cut off: the others keep theirs
            self.prefixes[slot] = Prefix(whole.keys[:, :, :shared].clone(), whole.values[:, :, :shared].clone())
        elif shared >= start:
            own = shared - start
            self.make_room(own)
            if slot != source:
                self.keys[:, slot, :, :own] = self.keys[:, source, :, :own]
                self.values[:, slot, :, :own] = self.values[:, source, :, :own]
            self.prefixes[slot] = self.prefixes[source]
        else:
            prefix = self.prefixes[source]
            self.prefixes[slot] = None
            self.make_room(shared)
            if prefix is not None:
                self.keys[:, slot, :, :shared] = prefix.keys[:, :, :shared]
                self.values[:, slot, :, :shared] = prefix.values[:, :, :shared]
        self.tokens[slot, : len(prompt)] = prompt
        self.planned[slot], self.computed[slot], self.owners[slot] = len(prompt), shared, owner

    def append(self, slot: int, token: int) -> None:
        """Add a sampled token to a slot's sequence; its keys and values come with the next step."""
        self.tokens[slot, self.planned[slot]] = token
        self.planned[slot] += 1

    def end(self, slot: int) -> None:
        """Forget what was planned and will not be computed: the slot's request has ended."""
        self.planned[slot] = self.computed[slot]
        if self.memories is not None:
            self.memories.end(slot)

    def extend_prefix(self, slot: int, keys: Tensor, values: Tensor) -> None:
        """Put newly computed tokens after the prefix of a slot that has no tail: (Y, K, n, D) each."""
        prefix = self.prefixes[slot]
        if prefix is not None:
            keys, values = torch.cat([prefix.keys, keys], 2), torch.cat([prefix.values, values], 2)
        self.prefixes[slot] = Prefix(keys, values)
        self.computed[slot] = len(self.prefixes[slot])  # type: ignore[arg-type]

    def seal(self, slot: int, upto: int) -> None:
        """Make the first `upto` tokens of a slot's sequence its prefix."""
        start, computed = self.start(slot), int(self.computed[slot])
        moved, kept = slice(0, upto - start), slice(upto - start, computed - start)
        rest = computed - upto
        keys, values = self.keys[:, slot], self.values[:, slot]
        kept_keys, kept_values = keys[:, :, kept].clone(), values[:, :, kept].clone()
        self.extend_prefix(slot, keys[:, :, moved].clone(), values[:, :, moved].clone())
        keys[:, :, :rest], values[:, :, :rest] = kept_keys, kept_values
        self.computed[slot] = computed

    def _split(self, source: int, shared: int) -> None:
        """Cut a prefix so that it ends where a new prompt leaves it.

        All that have the prefix take the shorter one, with the rest in their tails: so the prefix settles at what all
        prompts share. Only for a little that is cut off: every slot gets room for the longest tail.
        """
        old = self.prefixes[source]
        if old is None:
            return
        cut = len(old) - shared
        new = Prefix(old.keys[:, :, :shared].clone(), old.values[:, :, :shared].clone())
        users = [slot for slot in range(self.slots) if self.prefixes[slot] is old]
        self.make_room(max(self.tail(slot) for slot in users) + cut)
        for slot in users:
            for tails, whole in ((self.keys[:, slot], old.keys), (self.values[:, slot], old.values)):
                length = self.tail(slot)
                tails[:, :, cut : cut + length] = tails[:, :, :length].clone()
                tails[:, :, :cut] = whole[:, :, shared:]
            self.prefixes[slot] = new

    # Room.

    def make_room(self, tail: int) -> None:
        """Make room for tails of this length."""
        if tail > self.room:
            self._lay_out(_rounded(tail))

    def give_back_room(self, tail: int, idle: Sequence[int]) -> None:
        """Keep no more than twice the room that tails need now; idle slots may lose their last tokens."""
        if 2 * _rounded(tail) <= self.room:
            self._lay_out(_rounded(tail))
            for slot in idle:
                self.end(slot)  # else a request would wait for ever for tokens that nobody computes

    def _lay_out(self, room: int) -> None:
        shape = self.shape
        size = (shape.layers, self.slots, shape.key_heads, room, shape.head_width)
        kept = min(room, self.room)
        # Zeros, not empty: what a mask hides must still be finite.
        for name in ("keys", "values"):
            tails = torch.zeros(size, dtype=shape.dtype, device=shape.device)
            if kept:
                tails[..., :kept, :] = getattr(self, name)[..., :kept, :]
            setattr(self, name, tails)
        self.room = room
        for slot in range(self.slots):
            self.computed[slot] = min(int(self.computed[slot]), self.start(slot) + room)

    def swap(self, a: int, b: int) -> None:
        """Exchange the content of two slots."""
        length = max(self.tail(a), self.tail(b))
        for tails in (self.keys[..., :length, :], self.values[..., :length, :]):
            tails[:, [a, b]] = tails[:, [b, a]]
        for kept in (self.tokens, self.planned, self.computed, self.owners):
            kept[[a, b]] = kept[[b, a]]
        self.prefixes[a], self.prefixes[b] = self.prefixes[b], self.prefixes[a]
        if self.memories is not None:
            self.memories.swap(a, b)


def _rounded(length: int) -> int:
    return -(-length // BLOCK) * BLOCK
