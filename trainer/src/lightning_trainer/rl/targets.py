"""A teacher's distribution over the tokens that the policy could have sampled instead.

Axes: `_K` trained tokens of a row, `_C` candidates at each.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """A teacher's next-token distribution at each trained token of a row, over some candidates; it has no gradient.

    Attributes:
        tokens_KC: (K, C) the candidates, distinct in each row.
        logprobs_KC: (K, C) the teacher's natural log-probabilities of them.
        weights_K: (K,) weight of the divergence; 0 if nothing is taught.

    Raises:
        ValueError: the shapes differ.
    """

    tokens_KC: NDArray[np.int64]
    logprobs_KC: NDArray[np.float32]
    weights_K: NDArray[np.float32]

    def __post_init__(self) -> None:
        shape = self.tokens_KC.shape
        if len(shape) != 2 or self.logprobs_KC.shape != shape or self.weights_K.shape != shape[:1]:
            raise ValueError(f"shapes differ: {shape}, {self.logprobs_KC.shape}, {self.weights_K.shape}")
