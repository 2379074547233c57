"""Finds the known sequence with which a new one begins, by hash, in time linear in the new sequence."""

from __future__ import annotations

from functools import lru_cache
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")


class OpenSequences(Generic[T]):
    """Token sequences that may be continued, each with its owner."""

    def __init__(self) -> None:
        self._by_length: dict[int, dict[int, list[tuple[NDArray[np.int32], T]]]] = {}

    def add(self, ids: NDArray[np.int32], owner: T) -> None:
        """Allow later sequences to continue this one, which has at least one token."""
        with_length = self._by_length.setdefault(len(ids), {})
        with_length.setdefault(int(_prefix_hashes(ids)[-1]), []).append((ids, owner))

    def take(self, ids: NDArray[np.int32]) -> T | None:
        """Take out the longest sequence with which `ids` begins, and return its owner; None if there is none.

        Among equal ones, the first added is taken.
        """
        hashes = _prefix_hashes(ids)
        for length in sorted((n for n in self._by_length if n <= len(ids)), reverse=True):
            candidates = self._by_length[length].get(int(hashes[length - 1]), [])
            for place, (known, owner) in enumerate(candidates):
                if np.array_equal(known, ids[:length]):  # equal hashes are no proof
                    del candidates[place]
                    return owner
        return None


def _prefix_hashes(ids: NDArray[np.int32]) -> NDArray[np.uint64]:
    """(T,) hash of each prefix: the sum of id times a power of an odd number, modulo 2**64."""
    powers = _powers(1 << len(ids).bit_length())[: len(ids)]
    return np.cumsum((ids.astype(np.uint64) + np.uint64(1)) * powers, dtype=np.uint64)


@lru_cache(maxsize=32)
def _powers(size: int) -> NDArray[np.uint64]:
    return np.cumprod(np.full(size, 0x9E3779B97F4A7C15, np.uint64), dtype=np.uint64)
