"""95 % intervals of mean rewards and of paired differences: the only place where one is computed. Pure functions.

The unit is the task. Samples of one task are alike, so a task counts once, with the mean of its samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

import numpy as np

METHOD: Final = "95 %, one value per task, exact for 0/1 rewards (Clopper-Pearson; Gaffke for graded ones)"
_TAIL: Final = 0.025  # probability outside each end
_GRID: Final = 4001
_EQUAL: Final = 1e-12  # share of the range of rewards below which a spread is rounding


Declared: TypeAlias = tuple[float, float] | None  # range of rewards that the user named; None: nobody did


class RewardBounds(NamedTuple):
    """Least and greatest reward that a task may earn, and whether that is known or only what was seen."""

    low: float
    high: float
    known: bool = True


UNIT: Final = RewardBounds(0.0, 1.0)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over tasks and its 95 % interval.

    Attributes:
        mean: None where there is no task.
        low: lower end of the interval; None likewise.
        high: its upper end, likewise.
    """

    mean: float | None
    low: float | None = None
    high: float | None = None

    def to_json(self) -> dict[str, float | None]:
        """Return the three by name."""
        return {"mean": self.mean, "low": self.low, "high": self.high}


def reward_bounds(rewards: Iterable[float], declared: Declared = None) -> RewardBounds:
    """Return the least and the greatest reward that a task may earn.

    That is the declared range, and what a failure counts as if that is outside of it. Without one it is 0 to 1 if all
    rewards are in there; otherwise it reaches from the lowest to the highest, and 0 is within it.
    """
    values = [*(declared or (0.0,)), *rewards]
    low, high = min(values), max(values)
    if declared is None and low >= 0 and high <= 1:
        return UNIT
    return RewardBounds(low, high, known=declared is not None)


def estimate_mean(values_N: Sequence[float], bounds: RewardBounds = UNIT) -> Estimate:  # noqa: N803
    """Return the mean over tasks with its 95 % interval.

    Each end allows for one more task that nobody has seen, at the worst (or best) reward there may be, and takes a
    quantile of the mean under random weights of all tasks, Dirichlet(1, ..., 1) (Gaffke 2005, "Three test statistics
    for a nonparametric one-sided hypothesis on the mean of a nonnegative variable"; Learned-Miller and Thomas,
    arXiv 1905.06208). Of 0/1 rewards that is the interval of Clopper and Pearson. Rewards of any other distribution
    in the bounds are covered, too: a t interval fails where a few tasks earn far less than the rest, such as crashes.

    Where the bounds are only those of the rewards that were seen, the interval is no narrower than Student's.

    Args:
        values_N: (N,) one number a task: the mean of its samples.
        bounds: least and greatest reward that a task may earn, see `reward_bounds`.
    """
    if len(values_N) == 0:
        return Estimate(None)
    values = np.asarray(values_N, dtype=np.float64)
    mean, (low, high) = float(values.mean()), _ends(values, bounds)
    if not bounds.known:
        error = _t_error(values)
        low, high = min(low, mean - error), max(high, mean + error)
    return Estimate(mean, low, high)


def estimate_difference(
    this_N: Sequence[float],  # noqa: N803
    other_N: Sequence[float],  # noqa: N803
    declared: Declared = None,
    *,
    comparisons: int = 1,
) -> Estimate:
    """Return by how much one mean over tasks is above another, paired by task, with its 95 % interval, by Student's t.

    With 0/1 rewards a difference is -1, 0 or 1, and Student's interval holds the truth in as few as 88 % at 10 tasks.
    There it reaches at least as far as `estimate_mean` between the differences that were seen and 0.

    Where all tasks differ by the same, their spread says nothing. Then it is as `estimate_mean`, within what one more
    task might be: no difference or twice this one, and where there is none, any.

    Args:
        this_N: (N,) one number a task: the mean of its samples.
        other_N: (N,) the same of what it is compared with.
        declared: range of the rewards.
        comparisons: number of differences of which all intervals together hold the truth in 95 % (Bonferroni): each
            then has the level 1 - 0.05 / comparisons.
    """
    if len(this_N) == 0:
        return Estimate(None)
    values = np.subtract(this_N, other_N, dtype=np.float64)
    lowest, highest, _ = reward_bounds([*this_N, *other_N], declared)
    width = highest - lowest
    tail = _TAIL / comparisons
    mean, error = float(values.mean()), _t_error(values, tail)
    if error <= _EQUAL * width:
        low, high = sorted((0.0, 2 * mean)) if abs(mean) > _EQUAL * width else (-width, width)
        return Estimate(mean, *_ends(values, (max(-width, low), min(width, high)), tail))
    low, high = max(-width, mean - error), min(width, mean + error)
    if np.isin(values, (-width, 0.0, width)).all():
        ends = _ends(values, (min(0.0, values.min()), max(0.0, values.max())), tail)
        low, high = min(low, ends[0]), max(high, ends[1])
    return Estimate(mean, low, high)


def _ends(values: np.ndarray, bounds: Sequence[float], tail: float = _TAIL) -> tuple[float, float]:
    low, width = bounds[0], bounds[1] - bounds[0]
    shares = np.clip((values - low) / width, 0.0, 1.0)
    return low + width * _lower_share(shares, tail), low + width * (1.0 - _lower_share(1.0 - shares, tail))


def _lower_share(shares: np.ndarray, tail: float) -> float:
    """Return the lower end of the mean of shares in 0..1.

    The mean under Dirichlet weights has the first two moments of a beta distribution, and with shares of 0 and 1 is
    one; it is taken for one here.
    """
    count = len(shares) + 1  # with the task that nobody has seen, at 0
    mean = float(shares.sum()) / count
    variance = (float(np.square(shares).sum()) / count - mean**2) / (count + 1)
    if variance <= 0:
        return 0.0
    both = mean * (1 - mean) / variance - 1
    return 1 / (1 + math.exp(-_beta_log_odds(mean * both, (1 - mean) * both, tail)))


def _t_error(values: np.ndarray, tail: float = _TAIL) -> float:
    """Return half the width of Student's interval; 0 where there is but one value."""
    count = len(values)
    if count == 1:
        return 0.0
    # t**2 / (t**2 + degrees) has a beta distribution
    degrees = count - 1
    quantile = math.sqrt(degrees * math.exp(-_beta_log_odds(degrees / 2, 0.5, 2 * tail)))
    return quantile * float(values.std(ddof=1)) / math.sqrt(count)


def _beta_log_odds(a: float, b: float, probability: float) -> float:
    """Return log(x / (1 - x)) of the quantile x of a beta distribution.

    In the log odds its density is smooth and has one peak, which sums on a grid follow to five digits.
    """
    peak, spread = math.log(a / b), math.sqrt(1 / a + 1 / b)
    odds = np.linspace(peak - 8 * spread - 20 / a, peak + 8 * spread + 20 / b, _GRID)
    log_density = a * odds - (a + b) * np.logaddexp(0.0, odds)
    density = np.exp(log_density - log_density.max())
    cumulative = np.cumsum(density) - density / 2
    return float(np.interp(probability, cumulative / density.sum(), odds))
