"""Training rows as a tree: shared prefixes of rows are forwarded once, with gradient.

Sorting puts rows with a shared prefix next to each other. Each row then adds only the tokens in which it differs from
the previous row, and finds the others at the places of earlier rows. Attention is causal along each row's own path, so
hidden states, and the sum of gradients, are those of rows forwarded one by one.

Axes: R rows of a micro-batch, N packed tokens, P trained tokens (row after row), U distinct places that predict them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_trainer.rl.rows import Row

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """The tokens that one row adds, and the places of all its tokens.

    Attributes:
        path: (T,) packed place of each token of the row.
        new: number of tokens at the end of the path that the row adds.
    """

    path: IntArray
    new: int


@dataclass(frozen=True, slots=True, eq=False)
class PackedMicroBatch:
    """One micro-batch.

    Attributes:
        rows: (R,) numbers of its rows in the batch.
        tokens_N: (N,) token ids.
        positions_N: (N,) their positions in the rows.
        segments: for each row that adds tokens.
        predicts_U: (U,) packed places whose logits are needed.
        temperature_U: (U,) divisor of their logits.
        place_P: (P,) for each trained token the index into `predicts_U` of the place that predicts it.
        target_P: (P,) its token id.
    """

    rows: IntArray
    tokens_N: IntArray
    positions_N: IntArray
    segments: tuple[Segment, ...]
    predicts_U: IntArray
    temperature_U: NDArray[np.float32]
    place_P: IntArray
    target_P: IntArray


def micro_batches(rows: Sequence[Row], max_tokens: int, *, share: bool = True) -> Iterator[PackedMicroBatch]:
    """Yield micro-batches of sorted rows, with as many as fit into each; shared prefixes are counted once.

    Args:
        rows: the batch.
        max_tokens: most packed tokens; a longer row goes alone.
        share: False packs each row whole, for comparison.
    """
    order = sorted(range(len(rows)), key=lambda r: rows[r].tokens.tolist())
    taken: list[int] = []
    size = 0
    for r in order:
        common = _common(rows[taken[-1]].tokens, rows[r].tokens) if taken and share else 0
        new = len(rows[r].tokens) - common
        if taken and size + new > max_tokens:
            yield _pack(rows, taken, share=share)
            taken, size, new = [], 0, len(rows[r].tokens)
        taken.append(r)
        size += new
    if taken:
        yield _pack(rows, taken, share=share)


def _pack(rows: Sequence[Row], taken: list[int], *, share: bool) -> PackedMicroBatch:
    tokens, positions, segments = [], [], []
    place, target, temperature = [], [], []
    path = np.empty(0, np.int64)
    previous = np.empty(0, np.int32)
    size = 0
    for r in taken:
        row = rows[r]
        common = _common(previous, row.tokens) if share else 0
        new = len(row.tokens) - common
        path = np.concatenate([path[:common], np.arange(size, size + new)])
        previous, size = row.tokens, size + new
        if new:
            tokens.append(row.tokens[common:])
            positions.append(np.arange(common, common + new))
            segments.append(Segment(path, new))
        trained = np.flatnonzero(row.mask)
        place.append(path[trained - 1])
        target.append(row.tokens[trained])
        temperature.append(np.full(len(trained), row.temperature))
    keys = np.stack([np.concatenate(place).astype(np.float64), np.concatenate(temperature)])
    distinct, inverse = np.unique(keys, axis=1, return_inverse=True)  # rows may have different temperatures
    return PackedMicroBatch(
        rows=np.array(taken),
        tokens_N=np.concatenate(tokens).astype(np.int64),
        positions_N=np.concatenate(positions),
        segments=tuple(segments),
        predicts_U=distinct[0].astype(np.int64),
        temperature_U=distinct[1].astype(np.float32),
        place_P=inverse.reshape(-1),
        target_P=np.concatenate(target).astype(np.int64),
    )


def _common(a: NDArray[np.int32], b: NDArray[np.int32]) -> int:
    """Return the number of leading tokens that two rows share."""
    width = min(len(a), len(b))
    differs = a[:width] != b[:width]
    return int(differs.argmax()) if differs.any() else width
