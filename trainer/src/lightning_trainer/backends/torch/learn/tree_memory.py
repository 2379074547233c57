"""Recurrent layers over packed rows, with gradient: each row continues from the memory where it branches off another.

Axes: N packed tokens, B stretches that run together, T tokens of each, padded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from lightning_trainer.backends.torch.learn.tree import IntArray, Segment
from lightning_trainer.backends.torch.model.recurrent import Layer, Memory, Remembered


@dataclass(frozen=True, slots=True, eq=False)
class _Stretch:
    """Consecutive tokens, up to where rows branch.

    Attributes:
        places: packed places of the tokens.
        parent: number of the stretch before it; -1: there is none.
        level: number of stretches before it.
        parts: whether stretches follow it.
    """

    places: IntArray
    parent: int
    level: int
    parts: bool


class TreeMemory:
    """The order in which recurrent layers read a packed micro-batch."""

    def __init__(self, segments: Sequence[Segment], device: torch.device) -> None:
        self._stretches = _stretches(segments)
        self._batches = [_Batch(self._stretches, numbers, device) for numbers in _alike(self._stretches)]
        order = np.concatenate([batch.places for batch in self._batches])
        self._back = torch.from_numpy(np.argsort(order)).to(device)

    def recur(self, layer: Layer, hidden_NW: Tensor) -> Tensor:
        """(N, width) to (N, width), parents before children."""
        known: dict[int, Remembered] = {}
        parts = [batch.recur(layer, hidden_NW, known) for batch in self._batches]
        return torch.cat(parts).index_select(0, self._back)


class _Batch:
    """Stretches of one level that run together."""

    def __init__(self, stretches: Sequence[_Stretch], numbers: Sequence[int], device: torch.device) -> None:
        own = [stretches[number] for number in numbers]
        length = max(len(stretch.places) for stretch in own)
        padded = np.zeros((len(own), length), np.int64)
        for row, stretch in enumerate(own):
            padded[row, : len(stretch.places)] = stretch.places
        self._numbers = [number for number in numbers if stretches[number].parts]
        self._parents = [stretch.parent for stretch in own if stretch.parent >= 0]
        self._shape = padded.shape
        real = np.flatnonzero(np.arange(length) < np.array([[len(stretch.places)] for stretch in own]))
        self.places: IntArray = padded.reshape(-1)[real]
        self._padded, self._real = (torch.from_numpy(index).to(device) for index in (padded.reshape(-1), real))

    def recur(self, layer: Layer, hidden_NW: Tensor, known: dict[int, Remembered]) -> Tensor:
        """Return (number of places, width); add to `known` the memory after each stretch that others follow."""
        before: Remembered = {}
        for name in known[self._parents[0]] if self._parents else ():
            before[name] = torch.stack([known[parent][name] for parent in self._parents])
        memory = Memory(before)
        out = layer(hidden_NW.index_select(0, self._padded).view(*self._shape, -1), memory)
        for row, number in enumerate(self._numbers):
            known[number] = {name: tensor[row] for name, tensor in memory.after.items()}
        return out.flatten(0, 1).index_select(0, self._real)


def _stretches(segments: Sequence[Segment]) -> list[_Stretch]:
    """Return the stretches of rows, cut where others branch off; a parent comes before its children."""
    leaving = {int(segment.path[-segment.new - 1]) for segment in segments if segment.new < len(segment.path)}
    ends: dict[int, int] = {}  # the last place of each stretch, to the number of the stretch
    stretches: list[_Stretch] = []
    for segment in segments:
        parent = ends[int(segment.path[-segment.new - 1])] if segment.new < len(segment.path) else -1
        own = segment.path[-segment.new :]
        cuts = [at + 1 for at, place in enumerate(own[:-1].tolist()) if place in leaving]
        for places in np.split(own, cuts):
            last = int(places[-1])
            level = stretches[parent].level + 1 if parent >= 0 else 0
            stretches.append(_Stretch(places, parent, level, last in leaving))
            parent = ends[last] = len(stretches) - 1
    return stretches


def _alike(stretches: Sequence[_Stretch]) -> Iterator[list[int]]:
    """Yield groups of stretches of one level.

    Those that others follow have equal lengths within a group; for the rest, padding at most doubles the length.
    """

    def kind(number: int) -> tuple[int, bool, int]:
        stretch = stretches[number]
        return stretch.level, stretch.parts, len(stretch.places)

    for (_, parts), level in groupby(sorted(range(len(stretches)), key=kind), key=lambda number: kind(number)[:2]):
        group: list[int] = []
        for number in level:
            first = len(stretches[group[0]].places) if group else 0
            length = len(stretches[number].places)
            if group and (length != first if parts else length > 2 * first):
                yield group
                group = []
            group.append(number)
        yield group
