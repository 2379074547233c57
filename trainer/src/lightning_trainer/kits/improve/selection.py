"""How much wider the intervals must be because each candidate was the best of several on some of the same tasks.

A candidate is the best state on the tasks for choosing. Its difference to the base is then measured on these tasks and
on the fresh ones together. Under the hypothesis that nothing differs from the base, the first part is the largest of
several correlated normal variables, and the second part is one more: Thall, Simon and Ellenberg, "Two-stage selection
and testing designs for comparative clinical trials", Biometrika 75 (1988). The quantile of the largest such sum over
all agents (max-t) is simulated, with the correlations of the measured differences (Hothorn, Bretz and Westfall,
"Simultaneous inference in general parametric models", 2008).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final

import numpy as np

from lightning_trainer.intervals import TAIL
from lightning_trainer.kits.improve.halving import Rewards

_DRAWS: Final = 40_000  # the tail of 2.5 % is then known to 3 % of itself
_LEAST: Final = 3  # tasks that a correlation needs


@dataclass(frozen=True, slots=True, kw_only=True)
class StatesOfAgent:
    """The states from which an agent's candidate was chosen.

    Attributes:
        states: rewards of each measured state on the tasks for choosing, by task.
        possible: number of states that could have been measured, whatever the rungs had shown.
    """

    states: Sequence[Rewards]
    possible: int


def equivalent_comparisons(base: Rewards, tried: Sequence[StatesOfAgent], fresh: int) -> float:
    """Return the number of comparisons whose Bonferroni correction is as wide as the choice requires.

    It is 1 if there was nothing to choose, and at most the number of possible states.

    Args:
        base: rewards of the unchanged agents on the tasks for choosing.
        tried: what was tried for each agent that has a candidate.
        fresh: number of tasks that were not used for the choice.
    """
    total = sum(max(each.possible, len(each.states)) for each in tried)
    if total <= 1:
        return 1.0
    correlations = _correlations(base, [state for each in tried for state in each.states])
    numbers = np.random.default_rng(0)
    chosen = len(base) / max(1, len(base) + fresh)
    rows, largest, first = np.arange(_DRAWS), np.full(_DRAWS, -np.inf), 0
    by_choice, by_fresh = (_Draws(correlations, numbers) for _ in range(2))
    for each in tried:
        its, missing = slice(first, first + len(each.states)), max(0, each.possible - len(each.states))
        choice = by_choice.of(its, missing)
        best = choice.argmax(axis=1)
        decides = by_fresh.of(its, missing)[rows, best]
        both = math.sqrt(chosen) * choice[rows, best] + math.sqrt(1 - chosen) * decides
        largest, first = np.maximum(largest, both), its.stop
    beyond = NormalDist().cdf(-float(np.quantile(largest, 1 - TAIL)))
    return min(float(total), max(1.0, TAIL / beyond))


class _Draws:
    """Samples of the standardised differences of all states, on one set of tasks, if no state differs from the base.

    A state that was not measured has the mean correlation with the measured ones.
    """

    def __init__(self, correlations: np.ndarray, numbers: np.random.Generator) -> None:
        count = len(correlations)
        self.numbers = numbers
        self.measured = numbers.standard_normal((_DRAWS, count)) @ np.linalg.cholesky(correlations).T
        between = (correlations.sum() - count) / max(1, count * (count - 1))
        spread = math.sqrt(max(correlations.mean(), 0.0)) or 1.0  # of the mean of the measured states
        self.common = self.measured.mean(axis=1, keepdims=True) / spread
        self.weight = min(1.0, max(0.0, between / spread))

    def of(self, measured: slice, missing: int) -> np.ndarray:
        """Return the samples of an agent's measured states, and of those that were not measured."""
        own = self.numbers.standard_normal((_DRAWS, missing))
        return np.hstack([self.measured[:, measured], self.weight * self.common + math.sqrt(1 - self.weight**2) * own])


def _correlations(base: Rewards, states: Sequence[Rewards]) -> np.ndarray:
    """Return the correlations of the states' differences to the base, less the more they may be due to few tasks."""
    found = np.eye(len(states))
    tasks = [task for task in base if all(task in state for state in states)]
    if len(tasks) < _LEAST:
        return found
    values = np.array([[state[task] - base[task] for task in tasks] for state in states])
    spread = np.linalg.norm(values - values.mean(axis=1, keepdims=True), axis=1)
    varies = spread > 0
    scaled = (values - values.mean(axis=1, keepdims=True))[varies] / spread[varies, None]
    found[np.ix_(varies, varies)] = (1 - 1 / math.sqrt(len(tasks))) * (scaled @ scaled.T)
    np.fill_diagonal(found, 1.0)
    return found
