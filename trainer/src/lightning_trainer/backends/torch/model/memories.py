"""Memories of recurrent layers, for the sequences in the slots of a cache.

The keys and values of a sequence's first tokens are among those of the whole; the memory of a recurrent layer is of all
that it has read. It is therefore available at the end of a slot's sequence, and as a copy at the end of its prompt,
where the other rollouts of a group begin. A prompt that leaves a sequence elsewhere is read from the nearer of these,
or from its start.

Axes: S slots, B neighbouring slots.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lightning_trainer.backends.torch.model.recurrent import Remembered

Counts = NDArray[np.int64]


class SlotMemories:
    """Memories of S sequences, of all recurrent layers."""

    def __init__(self, slots: int) -> None:
        self._layers: dict[int, Remembered] = {}  # (S, ...) each; created when a layer first stores its memory
        self._slots = slots
        self.read: Counts = np.zeros(slots, np.int64)  # number of tokens that a slot's memory has read
        self._kept_at: Counts = np.zeros(slots, np.int64)  # number of tokens that the copy has read; 0: there is none
        self._keep_at: Counts = np.zeros(slots, np.int64)  # where one will be made
        self._kept: list[dict[int, Remembered]] = [{} for _ in range(slots)]

    def clear(self) -> None:
        """Clear all memories."""
        self.read[:] = self._kept_at[:] = self._keep_at[:] = 0
        self._kept = [{} for _ in range(self._slots)]

    def there(self, shared_S: Counts) -> Counts:
        """(S,) the most tokens of each slot's sequence, up to so many, for which there is a memory."""
        return np.maximum(_within(self.read, shared_S), _within(self._kept_at, shared_S))

    def coming(self, shared_S: Counts) -> Counts:
        """(S,) the same, including memories that are about to be made."""
        return np.maximum(self.there(shared_S), _within(self._keep_at, shared_S))

    def begin(self, slot: int, source: int, shared: int, prompt: int) -> None:
        """Start a slot's sequence from the first `shared` tokens of another's, up to the end of a prompt."""
        if not shared:
            for tensors in self._layers.values():
                for tensor in tensors.values():
                    tensor[slot].zero_()
        elif self.read[source] == shared:
            for tensors in self._layers.values():
                for tensor in tensors.values() if slot != source else ():
                    tensor[slot] = tensor[source]
        else:
            for layer, tensors in self._kept[source].items():
                for name, tensor in tensors.items():
                    self._layers[layer][name][slot] = tensor
        if self._kept_at[source] <= shared:
            self._kept[slot], self._kept_at[slot] = self._kept[source], self._kept_at[source]
        else:
            self._kept[slot], self._kept_at[slot] = {}, 0
        self._keep_at[slot] = max(prompt - 1, 0)
        self.have_read(slot, shared)

    def end(self, slot: int) -> None:
        """Make no more copies for a slot, because its request has ended."""
        self._keep_at[slot] = 0

    def of(self, layer: int, slots: slice) -> Remembered | None:
        """Return the memory of a layer for neighbouring slots; None if it has not begun."""
        tensors = self._layers.get(layer)
        return None if tensors is None else {name: tensor[slots] for name, tensor in tensors.items()}

    def put(self, layer: int, slots: slice, tensors: Mapping[tuple[str, int], Tensor]) -> None:
        """Store the current memory of a layer: (B, ...) each."""
        own = self._layers.setdefault(layer, {})
        for name, tensor in tensors.items():
            if name not in own:
                own[name] = tensor.new_zeros(self._slots, *tensor.shape[1:])
            own[name][slots] = tensor

    def have_read(self, slot: int, count: int) -> None:
        """Set how many tokens of a slot have been read; at the end of its prompt, keep a copy."""
        self.read[slot] = count
        if count == self._keep_at[slot] != self._kept_at[slot]:
            self._kept_at[slot] = count
            self._kept[slot] = {
                layer: {name: tensor[slot].clone() for name, tensor in tensors.items()}
                for layer, tensors in self._layers.items()
            }

    def swap(self, a: int, b: int) -> None:
        """Exchange two slots."""
        for tensors in self._layers.values():
            for tensor in tensors.values():
                tensor[[a, b]] = tensor[[b, a]]
        for counts in (self.read, self._kept_at, self._keep_at):
            counts[[a, b]] = counts[[b, a]]
        self._kept[a], self._kept[b] = self._kept[b], self._kept[a]


def _within(counts_S: Counts, most_S: Counts) -> Counts:
    return np.where(counts_S <= most_S, counts_S, 0)
