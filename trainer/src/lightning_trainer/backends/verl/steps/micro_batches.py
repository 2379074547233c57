"""The number of rows that a worker processes at once, decided for each batch once the lengths of its rows are known."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any


def in_order(lengths: Sequence[int], workers: int) -> list[int]:
    """Return the places of rows, ordered so that each worker keeps its rows and neighbours have similar lengths."""
    each = len(lengths) // workers
    return [
        place
        for first in range(0, len(lengths), each)
        for place in sorted(range(first, first + each), key=lengths.__getitem__)
    ]


def micro_batch_options(
    lengths: Sequence[int], workers: int, budget: int, *, packed: bool, sequence_parallel: int = 1
) -> dict[str, Any]:
    """Return verl's options of a batch such that only a micro-batch of one long row has more tokens than `budget`.

    verl counts tokens without the padding. Rows that are not packed are padded to the longest of their micro-batch, and
    verl mixes long and short ones: then a number of rows limits it.

    Args:
        lengths: of the rows, in tokens; the same number of rows for each worker.
        workers: that share the batch.
        budget: most tokens that a device processes at once.
        packed: whether rows are packed into one sequence.
        sequence_parallel: devices that share a row.
    """
    longest = max(lengths)
    if packed:
        needed = math.ceil(longest / sequence_parallel)
        return {"max_token_len_per_gpu": needed} if needed > budget else {}
    each = len(lengths) // workers
    rows = max(rows for rows in range(1, each + 1) if each % rows == 0 and (rows == 1 or rows * longest <= budget))
    return {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": rows}
