"""The gate: decides whether a candidate's outcomes justify its promotion, with error bounds stated in advance.

Conversations are compared within each period of constant share, because users and success rates change with time. The
difference of the means, weighted by its information, then behaves like a Brownian motion in information time, for any
distribution of the outcomes (Jennison and Turnbull, Group Sequential Methods, 2000, section 3).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from lightning_spans.errors import ConfigError

FloatArray: TypeAlias = npt.NDArray[np.float64]
Decision: TypeAlias = Literal["promote", "reject", "wait"]
FEWEST: Final = 100  # outcomes of each policy before any decision: the variance is estimated from them
_PRIOR: Final = 20.0
_MISSED: Final = 0.05  # share of the intervals that may ever miss the difference


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The error bounds of the gate. Outcomes are between 0 and 1, so 0.02 is two points of a success rate.

    Attributes:
        worse: a candidate that is worse by this is promoted with at most the probability `false_promotion`.
        better: a candidate that is better by this is promoted with at least the probability `power`.
        false_promotion: see `worse`.
        power: see `better`.
    """

    worse: float = 0.02
    better: float = 0.03
    false_promotion: float = 0.01
    power: float = 0.9

    def __post_init__(self) -> None:
        for name in ("worse", "better", "false_promotion", "power"):
            if not 0.0 < getattr(self, name) < 1.0:
                raise ConfigError(f"the gate's {name} is {getattr(self, name):g}. Give a number between 0 and 1.")

    def information(self, difference: float) -> float:
        """Return the mean information at the decision for a candidate with this difference (Wald's identity).

        Information is 1 over the variance of the estimated difference.
        """
        upper, lower = -math.log(self.false_promotion), -math.log(1.0 - self.power)
        width = self.worse + self.better
        drift = width * (difference - (self.better - self.worse) / 2)
        if abs(drift) < 1e-12:
            return upper * lower / width**2
        root = math.exp(-2.0 * drift / width**2 * lower)
        top = math.exp(-2.0 * drift / width**2 * (upper + lower))
        wins = (1.0 - root) / (1.0 - top)
        return (wins * upper - (1.0 - wins) * lower) / drift

    def needed(self, share: float, variance: float = 0.25) -> int:
        """Return the mean number of outcomes until a candidate that is better by `better` is promoted.

        Args:
            share: share of the conversations that the candidate answers, below 1.
            variance: variance of an outcome; 0.25 is the largest for a success rate.
        """
        return math.ceil(self.information(self.better) * variance / (share * (1.0 - share)))


@dataclass(frozen=True, slots=True)
class Sums:
    """Outcomes of one policy in one stratum. Each field may be an array, for many tests at once.

    Attributes:
        n: number of outcomes.
        total: their sum.
        squares: the sum of their squares.
    """

    n: Any
    total: Any
    squares: Any

    @classmethod
    def of(cls, outcomes: Sequence[float]) -> Sums:
        """Sum up outcomes."""
        return cls(float(len(outcomes)), float(sum(outcomes)), float(sum(one * one for one in outcomes)))

    def mean_and_variance(self) -> tuple[FloatArray, FloatArray]:
        """Return the mean, and the variance of the mean with `_PRIOR` additional successes and failures.

        Without them, a lucky candidate with a high success rate would seem to vary less, and be promoted too often.
        """
        n, total = np.asarray(self.n) + 2.0 * _PRIOR, np.asarray(self.total) + _PRIOR
        spread = (np.asarray(self.squares) + _PRIOR) / n - (total / n) ** 2
        seen = np.maximum(np.asarray(self.n), 1.0)
        return np.asarray(self.total) / seen, spread / seen


@dataclass(frozen=True, slots=True)
class Evidence:
    """The evidence in the outcomes, and the decision.

    Attributes:
        candidate: number of outcomes of the candidate.
        stable: number of outcomes of the stable policy.
        difference: difference of their means, candidate minus stable; None while there are too few, or no period of
            constant share has outcomes of both.
        low: lower end of its interval, which covers all looks at once with 95 %; None likewise.
        high: upper end.
        decision: the gate's decision.
    """

    candidate: int
    stable: int
    difference: float | None
    low: float | None
    high: float | None
    decision: Decision


def log_ratio(strata: Sequence[tuple[Sums, Sums]], bounds: Bounds) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return the log likelihood ratio of "better" to "worse", the difference, and its information.

    Wald's sequential probability ratio test (Annals of Mathematical Statistics 16, 1945). The ratio is a nonnegative
    martingale under "worse", and so is its inverse under "better". Ville's inequality therefore bounds both errors for
    any number of looks at any times: the probability is at most `false_promotion` that the ratio ever exceeds
    1/`false_promotion`, and at most 1 - `power` that it ever falls below 1 - `power`.

    Args:
        strata: outcomes of the candidate and of the stable policy, for each period of constant share.
        bounds: the two hypotheses.
    """
    weighted, information = np.asarray(0.0), np.asarray(0.0)
    for candidate, stable in strata:
        (mean_c, variance_c), (mean_s, variance_s) = candidate.mean_and_variance(), stable.mean_and_variance()
        there = (np.asarray(candidate.n) > 0) & (np.asarray(stable.n) > 0)
        weight = np.where(there, 1.0 / (variance_c + variance_s), 0.0)
        weighted, information = weighted + weight * (mean_c - mean_s), information + weight
    difference = weighted / np.maximum(information, 1e-12)
    middle = (bounds.better - bounds.worse) / 2
    return (bounds.better + bounds.worse) * information * (difference - middle), difference, information


def decide(ratio: FloatArray, fewest: Any, bounds: Bounds) -> FloatArray:
    """Return 1 to promote, -1 to reject and 0 to wait, for each ratio; `fewest` is the smaller number of outcomes."""
    enough = np.asarray(fewest) >= FEWEST
    promoted = ratio >= -math.log(bounds.false_promotion)
    rejected = ratio <= math.log(1.0 - bounds.power)
    return np.where(enough, promoted.astype(float) - rejected.astype(float), 0.0)


def weigh(strata: Sequence[tuple[Sequence[float], Sequence[float]]], bounds: Bounds) -> Evidence:
    """Return the evidence in outcomes; see `log_ratio`."""
    sums = [(Sums.of(candidate), Sums.of(stable)) for candidate, stable in strata]
    numbers = [int(sum(arm.n for arm in arms)) for arms in zip(*sums, strict=True)] if sums else [0, 0]
    if min(numbers) < FEWEST:
        return Evidence(numbers[0], numbers[1], None, None, None, "wait")
    ratio, difference, information = log_ratio(sums, bounds)
    if not information:
        return Evidence(numbers[0], numbers[1], None, None, None, "wait")
    decisions: dict[float, Decision] = {1.0: "promote", -1.0: "reject", 0.0: "wait"}
    half = half_width(float(information), bounds)
    middle = float(difference)
    decision = decisions[float(decide(ratio, min(numbers), bounds))]
    return Evidence(numbers[0], numbers[1], middle, middle - half, middle + half, decision)


def half_width(information: float, bounds: Bounds) -> float:
    """Return half the width of an interval of the difference that is valid for repeated looks.

    The asymptotic confidence sequence of Waudby-Smith, Arbour, Sinha, Kennedy and Ramdas (arXiv 2103.06476), narrowest
    at the information at which the test is expected to end.
    """
    scale = information / bounds.information(bounds.better) + 1.0
    return math.sqrt(2.0 * scale / (information * (scale - 1.0)) * math.log(math.sqrt(scale) / _MISSED))
