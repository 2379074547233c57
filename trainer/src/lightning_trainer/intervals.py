"""95 % intervals of mean rewards and of paired differences, which are computed only here. Pure functions.

The unit is the task. Samples of one task are correlated, so a task counts once, with the mean of its samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

import numpy as np

METHOD: Final = "95 %, one value per task, exact for 0/1 rewards (Clopper-Pearson; Gaffke for graded ones)"
TAIL: Final = 0.025  # probability beyond each end
_GRID: Final = 4001


Declared: TypeAlias = tuple[float, float] | None  # range of rewards that the user declared; None: not declared


class RewardBounds(NamedTuple):
    """Least and greatest reward that a task may earn, and whether they are known or only observed."""

    low: float
    high: float
    known: bool = True


UNIT: Final = RewardBounds(0.0, 1.0)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over tasks and its 95 % interval.

    Attributes:
        mean: None if there are no tasks.
        low: lower end of the interval; None likewise.
        high: upper end, likewise.
    """

    mean: float | None
    low: float | None = None
    high: float | None = None

    def to_json(self) -> dict[str, float | None]:
        """Return the three values by name."""
        return {"mean": self.mean, "low": self.low, "high": self.high}


def reward_bounds(rewards: Iterable[float], declared: Declared = None) -> RewardBounds:
    """Return the least and the greatest reward that a task may earn.

    This is the declared range, extended to the value of a failure if that is outside it. Without a declared range it is
    0 to 1 if all rewards are within that; otherwise it reaches from the lowest to the highest reward and includes 0.
    """
    values = [*(declared or (0.0,)), *rewards]
    low, high = min(values), max(values)
    if declared is None and low >= 0 and high <= 1:
        return UNIT
    return RewardBounds(low, high, known=declared is not None)


def estimate_mean(values_N: Sequence[float], bounds: RewardBounds = UNIT) -> Estimate:  # noqa: N803
    """Return the mean over tasks with its 95 % interval.

    Each end allows for one more, unseen task with the worst (or best) possible reward, and takes a quantile of the mean
    under random weights of all tasks, Dirichlet(1, ..., 1) (Gaffke 2005, "Three test statistics for a nonparametric
    one-sided hypothesis on the mean of a nonnegative variable"; Learned-Miller and Thomas, arXiv 1905.06208). For 0/1
    rewards this is the Clopper-Pearson interval. Any other distribution of rewards within the bounds is covered, too; a
    t interval fails if a few tasks earn far less than the rest, such as crashes.

    If the bounds are only those of the observed rewards, the interval is no narrower than Student's.

    Args:
        values_N: (N,) one number per task: the mean of its samples.
        bounds: least and greatest reward that a task may earn, see `reward_bounds`.
    """
    return _estimate(np.asarray(values_N, dtype=np.float64), bounds, TAIL)


def estimate_difference(
    this_N: Sequence[float],  # noqa: N803
    other_N: Sequence[float],  # noqa: N803
    declared: Declared = None,
    *,
    comparisons: float = 1,
) -> Estimate:
    """Return by how much one mean over tasks exceeds another, paired by task, with its 95 % interval.

    This is the interval of `estimate_mean` for the differences. The unseen task is one in which one side earns the
    worst or the best possible reward, and the other what it earns elsewhere: whichever changes the mean most. Without
    it, a side that is slightly better on most tasks and fails on a few would be called better with confidence, as long
    as it has not failed yet.

    If all tasks differ by as much as possible, six or more are significant, as in a sign test.

    Args:
        this_N: (N,) one number per task: the mean of its samples.
        other_N: (N,) the same for the other side of the comparison.
        declared: range of the rewards.
        comparisons: number of differences whose intervals all contain the truth in 95 % of cases (Bonferroni): each has
            the level 1 - 0.05 / comparisons; not necessarily a whole number.
    """
    if len(this_N) == 0:
        return Estimate(None)
    this, other = np.asarray(this_N, dtype=np.float64), np.asarray(other_N, dtype=np.float64)
    lowest, highest, known = reward_bounds([*this_N, *other_N], declared)
    width, values = highest - lowest, this - other
    loss = max(_earned_level(other - lowest, width), _earned_level(highest - this, width))
    gain = max(_earned_level(this - lowest, width), _earned_level(highest - other, width))
    reach = RewardBounds(min(-loss, float(values.min())), max(gain, float(values.max())), known)
    return _estimate(values, reach, TAIL / comparisons)


def _earned_level(levels: np.ndarray, width: float) -> float:
    """Return the mean level, weighted by the level itself, over all tasks and one more at the full width.

    A side that loses reward loses it where there is some: on the tasks that the other side solves, not on the average
    task. The one more task matters if there are few tasks, or if they earn nothing.
    """
    return float((np.square(levels).sum() + width**2) / (levels.sum() + width))


def _estimate(values: np.ndarray, bounds: RewardBounds, tail: float) -> Estimate:
    if len(values) == 0:
        return Estimate(None)
    mean, (low, high) = float(values.mean()), _ends(values, bounds, tail)
    if not bounds.known:
        error = _t_error(values, tail)
        low, high = min(low, mean - error), max(high, mean + error)
    return Estimate(mean, low, high)


def _ends(values: np.ndarray, bounds: RewardBounds, tail: float) -> tuple[float, float]:
    low, width = bounds.low, bounds.high - bounds.low
    shares = np.clip((values - low) / width, 0.0, 1.0)
    return low + width * _lower_share(shares, tail), low + width * (1.0 - _lower_share(1.0 - shares, tail))


def _lower_share(shares: np.ndarray, tail: float) -> float:
    """Return the lower end of the interval of the mean of shares in 0..1.

    The mean under Dirichlet weights has the first two moments of a beta distribution, and is beta-distributed if all
    shares are 0 or 1; it is treated as beta-distributed here.
    """
    count = len(shares) + 1  # includes the unseen task, at 0
    mean = float(shares.sum()) / count
    variance = (float(np.square(shares).sum()) / count - mean**2) / (count + 1)
    if variance <= 0:
        return 0.0
    both = mean * (1 - mean) / variance - 1
    return 1 / (1 + math.exp(-_beta_log_odds(mean * both, (1 - mean) * both, tail)))


def _t_error(values: np.ndarray, tail: float) -> float:
    """Return half the width of Student's interval; 0 for a single value."""
    count = len(values)
    if count == 1:
        return 0.0
    # t**2 / (t**2 + degrees) has a beta distribution
    degrees = count - 1
    quantile = math.sqrt(degrees * math.exp(-_beta_log_odds(degrees / 2, 0.5, 2 * tail)))
    return quantile * float(values.std(ddof=1)) / math.sqrt(count)


def _beta_log_odds(a: float, b: float, probability: float) -> float:
    """Return log(x / (1 - x)) of the quantile x of a beta distribution.

    In the log odds the density is smooth and has one peak, so sums on a grid are accurate to five digits.
    """
    peak, spread = math.log(a / b), math.sqrt(1 / a + 1 / b)
    odds = np.linspace(peak - 8 * spread - 20 / a, peak + 8 * spread + 20 / b, _GRID)
    log_density = a * odds - (a + b) * np.logaddexp(0.0, odds)
    density = np.exp(log_density - log_density.max())
    cumulative = np.cumsum(density) - density / 2
    return float(np.interp(probability, cumulative / density.sum(), odds))
