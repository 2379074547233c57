"""Whether an engine samples from the weights that the learner published, from log-probabilities of the same tokens.

Axes: `_K` tokens.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

_SIGMAS: Final = 4.0  # a share this many standard errors away from another is certainly different


class UpdateDelivery(NamedTuple):
    """How much of an update reached the engine.

    Attributes:
        share: 1 if the engine has the new weights, 0 if it has the previous ones.
        error: standard error of the share; infinite if the update changed nothing visible.
    """

    share: float
    error: float

    @property
    def missing(self) -> bool:
        """Whether the engine certainly does not have the update."""
        return self.share < 0.5 and 1.0 - self.share > _SIGMAS * self.error


def delivery(
    before_K: NDArray[np.floating], after_K: NDArray[np.floating], engine_K: NDArray[np.floating]
) -> UpdateDelivery:
    """Project the engine's change onto the update's change, so that rounding, which is not part of it, cancels.

    Args:
        before_K: (K,) the learner's log-probabilities before the update.
        after_K: (K,) after it.
        engine_K: (K,) the engine's, requested after the update.
    """
    moved_K = after_K.astype(np.float64) - before_K
    seen_K = engine_K.astype(np.float64) - before_K
    size = float(moved_K @ moved_K)
    if len(moved_K) < 2 or size <= 0.0:
        return UpdateDelivery(0.0, float("inf"))
    share = float(seen_K @ moved_K) / size
    rest_K = seen_K - share * moved_K
    return UpdateDelivery(share, float(np.sqrt(rest_K @ rest_K / (len(moved_K) - 1) / size)))


def correlation(one_K: NDArray[np.floating], other_K: NDArray[np.floating]) -> float:
    """Return Pearson's correlation; 1 if all values of either are equal."""
    if len(one_K) < 2 or float(np.ptp(one_K)) == 0.0 or float(np.ptp(other_K)) == 0.0:
        return 1.0
    return float(np.corrcoef(one_K.astype(np.float64), other_K.astype(np.float64))[0, 1])
