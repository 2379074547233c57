"""What samples say of tasks that were not drawn: intervals by bootstrap, pass@k and pass^k. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from typing import Final

import numpy as np
from numpy.typing import NDArray

RESAMPLES: Final = 10_000
LEVEL: Final = 0.95
METHOD: Final = f"percentile bootstrap over tasks, {RESAMPLES} resamples, 95 %"
_BLOCK: Final = 4_000_000  # numbers in memory at once


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over tasks and where it may lie.

    Attributes:
        mean: None where there is no task.
        low: lower end of the interval; None where there are fewer than two tasks, of which nothing can be drawn anew.
        high: its upper end, likewise.
    """

    mean: float | None
    low: float | None = None
    high: float | None = None

    def to_json(self) -> dict[str, float | None]:
        """Return the three by name."""
        return {"mean": self.mean, "low": self.low, "high": self.high}


def estimate(values_N: Sequence[float], *, seed: int = 0) -> Estimate:  # noqa: N803 - axes are suffixes
    """Return the mean over tasks with its 95 % interval, by the percentile bootstrap (Efron 1979).

    Tasks are drawn anew, each with all of its samples, since samples of one task are alike.

    Args:
        values_N: (N,) one number a task: the mean of its samples, or of a difference of two of these.
        seed: of the draws.
    """
    count = len(values_N)
    if count == 0:
        return Estimate(None)
    values = np.asarray(values_N, dtype=np.float64)
    mean = float(values.mean())
    if count == 1:
        return Estimate(mean)
    draw = np.random.default_rng(seed)
    block = max(1, _BLOCK // count)
    means = [
        values[draw.integers(0, count, (min(block, RESAMPLES - done), count))].mean(axis=1)
        for done in range(0, RESAMPLES, block)
    ]
    drawn: NDArray[np.float64] = np.concatenate(means)
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(mean, float(low), float(high))


def pass_at(samples: int, successes: int, k: int) -> float:
    """Return pass@k of a task: the chance that at least one of k samples succeeds.

    Unbiased: 1 - C(n - c, k) / C(n, k) (Chen et al. 2021, arXiv 2107.03374, equation 1).

    Raises:
        ValueError: there are fewer than k samples.
    """
    _check(samples, successes, k)
    return 1.0 - comb(samples - successes, k) / comb(samples, k)


def pass_all(samples: int, successes: int, k: int) -> float:
    """Return pass^k of a task: the chance that k samples all succeed, C(c, k) / C(n, k) (arXiv 2406.12045).

    Raises:
        ValueError: there are fewer than k samples.
    """
    _check(samples, successes, k)
    return comb(successes, k) / comb(samples, k)


def _check(samples: int, successes: int, k: int) -> None:
    if not 1 <= k <= samples or not 0 <= successes <= samples:
        raise ValueError(f"k = {k} of {samples} samples, {successes} of them good")
