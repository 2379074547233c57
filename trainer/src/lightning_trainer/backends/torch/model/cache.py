"""The key-value cache of the engine: sequences of blocks, which sequences with the same prefix share.

Each slot contains the tokens of one sequence and the numbers of its blocks. A block in several slots is never written
again, so a prompt that continues another sequence shares its full blocks and copies at most one. Slots keep their
content after their request has ended, so that a later prompt can continue it. If memory for more blocks is short, the
slots whose requests ended first lose theirs.

Axes: Y layers, S slots, K key heads, D head width, B tokens of a block, Z blocks of a slot, U blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import psutil
import torch
from numpy.typing import NDArray

from lightning_trainer.backends.torch.model.memories import SlotMemories

IDS = NDArray[np.int32]

BLOCK = 64  # tokens; shorter blocks waste less memory, and longer ones make larger matrix products


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The shape of a model's cache.

    Attributes:
        layers: number of those that attend.
        key_heads: of each.
        head_width: of each.
        dtype: of keys and values.
        device: of keys and values.
        recurrent: whether the model also has recurrent layers.
    """

    layers: int
    key_heads: int
    head_width: int
    dtype: torch.dtype
    device: torch.device
    recurrent: bool = False


class SlotCache:
    """Keys and values of S sequences. Used by one thread; others may only call `shared`."""

    def __init__(self, shape: CacheShape, slots: int, max_tokens: int) -> None:
        self.shape, self.slots = shape, slots
        self.tokens: IDS = np.zeros((slots, max_tokens), np.int32)
        self.planned: NDArray[np.int64] = np.zeros(slots, np.int64)  # tokens that a slot has or is about to compute
        self.computed: NDArray[np.int64] = np.zeros(slots, np.int64)  # tokens with keys and values
        self.owners: NDArray[np.int64] = np.full(slots, -1)  # number of the adapter that computed a slot's content
        self.ended: NDArray[np.int64] = np.zeros(slots, np.int64)  # order of the ends of requests; 0: running, or empty
        self.blocks: NDArray[np.int64] = np.zeros((slots, -(-max_tokens // BLOCK)), np.int64)  # (S, Z)
        self.memories = SlotMemories(slots) if shape.recurrent else None
        self._held: NDArray[np.int64] = np.zeros(slots, np.int64)  # number of blocks of each slot
        self._users: NDArray[np.int64] = np.zeros(0, np.int64)  # (U,) number of slots that use each block
        self._most = 0  # most blocks in use at once since the last `clear`
        self.keys = self.values = torch.empty(0)
        self._resize(0)

    @property
    def blocks_in_use(self) -> int:
        """Number of blocks that slots use."""
        return int((self._users > 0).sum())

    def clear(self) -> None:
        """Clear the cache after a change of weights.

        Memory is freed if most of it was not needed since the last time.
        """
        self.planned[:] = self.computed[:] = self.ended[:] = self._held[:] = self._users[:] = 0
        if 2 * self._most < len(self._users):
            self._resize(0)  # first, so that it needs less memory and not more
            self._resize(self._most)
        self._most = 0
        if self.memories is not None:
            self.memories.clear()

    def free(self) -> None:
        """Clear the cache and free its memory."""
        self._most = 0
        self.clear()

    def shared(self, prompt: IDS, owner: int = -1) -> NDArray[np.int64]:
        """(S,) number of leading tokens that each slot's content, computed or planned, shares with a prompt.

        Only for slots of the same adapter, because keys and values of another adapter differ.
        """
        width = min(len(prompt), int(self.planned.max(initial=0)))
        if not width:
            return np.zeros(self.slots, np.int64)
        differs = self.tokens[:, :width] != prompt[:width]
        first = np.where(differs.any(1), differs.argmax(1), width)
        return np.where(self.owners == owner, np.minimum(first, self.planned), 0)

    def there(self, shared_S: NDArray[np.int64]) -> NDArray[np.int64]:
        """(S,) how many of the tokens that each slot shares with a prompt can be continued now."""
        computed = np.minimum(shared_S, self.computed)
        return computed if self.memories is None else self.memories.there(computed)

    def coming(self, shared_S: NDArray[np.int64]) -> NDArray[np.int64]:
        """(S,) the same, once the planned tokens have been computed."""
        return shared_S if self.memories is None else self.memories.coming(shared_S)

    # The life of a sequence in a slot.

    def begin(self, slot: int, prompt: IDS, source: int, shared: int, owner: int = -1) -> None:
        """Assign a slot to a prompt of an adapter. `source` contains the first `shared` tokens of the prompt."""
        if self.memories is not None:
            self.memories.begin(slot, source, shared, len(prompt))
        self.ended[slot] = 0
        full, rest = divmod(shared, BLOCK)
        taken = self.blocks[source, : full + bool(rest)].copy()
        self._users[taken] += 1  # first, so that blocks that the slot releases are kept if it is also its source
        self._release(slot, 0)
        self.blocks[slot, : len(taken)], self._held[slot] = taken, len(taken)
        if rest and self._users[taken[-1]] > 1:
            self._copy_last(slot)
        self._hold(slot, len(prompt))
        self.tokens[slot, : len(prompt)] = prompt
        self.planned[slot], self.computed[slot], self.owners[slot] = len(prompt), shared, owner

    def append(self, slot: int, token: int) -> None:
        """Add a sampled token to a slot's sequence; its keys and values are computed in the next step."""
        self.tokens[slot, self.planned[slot]] = token
        self.planned[slot] += 1
        self._hold(slot, int(self.planned[slot]))

    def end(self, slot: int) -> None:
        """Discard planned tokens that will not be computed, because the slot's request has ended."""
        self.planned[slot] = self.computed[slot]
        self.ended[slot] = self.ended.max() + 1
        self._release(slot, -(-int(self.computed[slot]) // BLOCK))
        if self.memories is not None:
            self.memories.end(slot)

    def swap(self, a: int, b: int) -> None:
        """Exchange the content of two slots."""
        for kept in (self.tokens, self.planned, self.computed, self.owners, self.ended, self.blocks, self._held):
            kept[[a, b]] = kept[[b, a]]
        if self.memories is not None:
            self.memories.swap(a, b)

    # Blocks.

    def _hold(self, slot: int, tokens: int) -> None:
        """Take the first free blocks until a slot has enough for so many tokens."""
        held, wanted = int(self._held[slot]), -(-tokens // BLOCK)
        if held >= wanted:
            return
        if self._missing(wanted - held) > 0:
            self._grow(wanted - held)
        taken = np.flatnonzero(self._users == 0)[: wanted - held]
        self.blocks[slot, held:wanted], self._users[taken], self._held[slot] = taken, 1, wanted
        self._most = max(self._most, self.blocks_in_use)

    def _missing(self, blocks: int) -> int:
        """Return how many more blocks there must be, so that so many are free."""
        return self.blocks_in_use + blocks - len(self._users)

    def _grow(self, blocks: int) -> None:
        """Get so many free blocks: new ones, or if memory is short, those of idle slots, the longest idle first."""
        size = len(self._users)
        larger = max(size + self._missing(blocks), size * 3 // 2)
        try:
            self._check_memory(larger)
            self._resize(larger)
        except (MemoryError, RuntimeError):  # torch raises a RuntimeError if an allocation fails, on any device
            if self.keys.shape[1] > size:  # the values did not fit
                self.keys = self.keys[:, :size].clone()
            idle = np.flatnonzero(self.ended)
            for slot in idle[self.ended[idle].argsort()]:
                self.planned[slot] = self.computed[slot] = self.ended[slot] = 0
                self._release(slot, 0)
                if self._missing(blocks) <= 0:
                    return
            self._resize(size + self._missing(blocks))

    def _check_memory(self, blocks: int) -> None:
        """Refuse a size that does not fit into free memory beside the current one.

        An allocation of a processor's memory does not fail if there is too little: the system ends some process later.

        Raises:
            MemoryError: it does not fit.
        """
        shape = self.shape
        size = 2 * shape.layers * blocks * BLOCK * shape.key_heads * shape.head_width * shape.dtype.itemsize
        if shape.device.type in {"cpu", "mps"} and size > psutil.virtual_memory().available:
            raise MemoryError("no memory for more keys and values")

    def _release(self, slot: int, kept: int) -> None:
        """Release a slot's blocks after the first `kept`."""
        self._users[self.blocks[slot, kept : self._held[slot]]] -= 1
        self._held[slot] = min(kept, int(self._held[slot]))

    def _copy_last(self, slot: int) -> None:
        """Replace the last block of a slot, which other slots use too, by a copy that it may write to."""
        last = int(self._held[slot]) - 1
        shared = int(self.blocks[slot, last])
        self._release(slot, last)
        self._hold(slot, (last + 1) * BLOCK)
        for part in (self.keys, self.values):
            part[:, self.blocks[slot, last]] = part[:, shared]

    def _resize(self, blocks: int) -> None:
        """Change the number of blocks, and keep the content of the first ones."""
        shape, kept = self.shape, min(blocks, len(self._users))
        for name, size in (("keys", (BLOCK, shape.head_width)), ("values", (shape.head_width, BLOCK))):
            # Zeros, not empty: masked content must still be finite.
            part = torch.zeros((shape.layers, blocks, shape.key_heads, *size), dtype=shape.dtype, device=shape.device)
            if kept:
                part[:, :kept] = getattr(self, name)[:, :kept]
            setattr(self, name, part)  # (Y, U, K, B, D) keys and (Y, U, K, D, B) values, as products read them
        self._users = np.concatenate([self._users[:kept], np.zeros(blocks - kept, np.int64)])
