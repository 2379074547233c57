"""How many rows a worker takes at once, decided for each batch, whose rows have lengths that are known."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any


def in_order(lengths: Sequence[int], workers: int) -> list[int]:
    """Return the places of rows so that each worker's rows are the same, and neighbours alike in length."""
    each = len(lengths) // workers
    return [
        place
        for first in range(0, len(lengths), each)
        for place in sorted(range(first, first + each), key=lengths.__getitem__)
    ]


def bounded(
    lengths: Sequence[int], workers: int, budget: int, *, packed: bool, sequence_parallel: int = 1
) -> dict[str, Any]:
    """Return verl's options of a batch, so that no micro-batch has more tokens than that, but for a row that is longer.

    verl counts tokens without the padding. Rows that are not packed are padded to the longest of their micro-batch, and
    verl puts long and short ones together: then a number of rows bounds it.

    Args:
        lengths: of the rows, in tokens; as many rows for each worker.
        workers: that share the batch.
        budget: most tokens that a device takes at once.
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
