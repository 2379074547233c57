"""Advantages: how much better than its group an attempt, or one call of it, did. Pure functions on float64 arrays.

Axes: `_N` attempts, `_M` transitions. Groups, attempts and agents are given as one id for each entry, of any kind that
numpy can sort: integers or strings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

FloatArray: TypeAlias = NDArray[np.float64]
IntArray: TypeAlias = NDArray[np.int64]
Ids: TypeAlias = Sequence[str] | Sequence[int] | NDArray[Any]

EPSILON = 1e-4  # GRPO's paper has none; TRL adds 1e-4, verl 1e-6. It only matters for groups that hardly differ.


def group_advantages(
    returns_N: FloatArray | Sequence[float], group_N: Ids, *, normalise: bool = True, eps: float = EPSILON
) -> FloatArray:
    """Centre each return on the mean of its group, and divide by the group's deviation.

    A = (R - mean(R)) / (std(R) + eps): GRPO, arXiv 2402.03300, equation in section 4.1.2. The deviation is the sample's
    (divided by n - 1), as torch.std, and therefore TRL and verl, have it. Without the division it is the estimator of
    Dr. GRPO, arXiv 2503.20783, which does not favour tasks that are nearly always or nearly never solved.

    Args:
        returns_N: (N,) one return for each attempt.
        group_N: (N,) the group each came from.
        normalise: whether to divide by the deviation.
        eps: added to the deviation, in units of the return.

    Returns:
        (N,) advantages, summing to 0 in each group; exactly 0 for a group of one and where all returns are equal.

    Raises:
        ValueError: lengths differ, or a return is not finite.
    """
    # An attempt is a transition whose value is the return: one formula serves both.
    return transition_advantages(returns_N, range(len(returns_N)), group_N, normalise=normalise, eps=eps)


def transition_advantages(
    values_M: FloatArray | Sequence[float],
    attempt_M: Ids | range,
    group_M: Ids,
    *,
    agent_M: Ids | None = None,
    normalise: bool = True,
    eps: float = EPSILON,
) -> FloatArray:
    """Compare the value of each transition with its group, counting each attempt once, however often it called.

    The baseline of a group is the mean over attempts of their mean value. The variance is the mean over attempts of
    their mean squared distance from the baseline, times n / (n - 1) for n attempts. Where all calls of an attempt have
    one value (credit `identical`), both are the mean and sample variance of the returns, and the result is that of
    `group_advantages`. Where values differ within attempts, their spread is part of the deviation: with the deviation
    of the attempts' means alone, equal means would be divided by `eps`.

    Args:
        values_M: (M,) credit of each transition.
        attempt_M: (M,) the attempt each belongs to.
        group_M: (M,) the group of that attempt.
        agent_M: (M,) the agent that called. When given, each agent is compared with itself, over the attempts in which
            it called; None compares all calls of the group.
        normalise: whether to divide by the deviation.
        eps: added to the deviation, in units of the value.

    Returns:
        (M,) advantages. Their mean over each attempt sums to 0 over the attempts of a group (of an agent in a group).
        Exactly 0 where only one attempt is there to compare, and where all values are equal.

    Raises:
        ValueError: lengths differ, a value is not finite, or an attempt is in two groups.
    """
    values = np.asarray(values_M, dtype=np.float64)
    lengths = {len(values), len(attempt_M), len(group_M), len(values if agent_M is None else agent_M)}
    if values.ndim != 1 or len(lengths) != 1:
        raise ValueError(f"values, attempts, groups and agents must be lists of one length, not of {sorted(lengths)}")
    if not np.isfinite(values).all():
        raise ValueError(
            f"value {values[~np.isfinite(values)][0]} at {int(np.argmin(np.isfinite(values)))}: not finite"
        )
    if not len(values):
        return values
    attempt, group = _numbered(attempt_M), _numbered(group_M)
    if len(np.unique(np.stack([attempt, group]), axis=1).T) != attempt.max() + 1:
        raise ValueError("an attempt is in two groups")
    if agent_M is not None:
        agent = _numbered(agent_M)
        group, attempt = _pairs(group, agent), _pairs(attempt, agent)

    attempts_G, weights = _weights(attempt, group)
    baseline_G = np.bincount(group, weights * values)
    centred = values - baseline_G[group]
    centred[_without_contrast(values, group, attempts_G)] = 0.0
    if not normalise:
        return centred
    variance_G = np.bincount(group, weights * centred**2) * attempts_G / np.maximum(attempts_G - 1, 1)
    return np.asarray(centred / (np.sqrt(variance_G) + eps)[group])


def _numbered(ids: Ids | range) -> IntArray:
    """(M,) ids as numbers from 0."""
    return np.asarray(np.unique(np.asarray(ids), return_inverse=True)[1], dtype=np.int64).reshape(-1)


def _pairs(left: IntArray, right: IntArray) -> IntArray:
    """(M,) one number for each pair that occurs."""
    return _numbered(left * (right.max() + 1) + right)


def _weights(attempt: IntArray, group: IntArray) -> tuple[IntArray, FloatArray]:
    """Number of attempts of each group, and weights of transitions: attempts weigh the same, calls share theirs."""
    _, first = np.unique(attempt, return_index=True)
    attempts_G = np.bincount(group[first], minlength=int(group.max()) + 1)
    return attempts_G, 1.0 / (np.bincount(attempt)[attempt] * attempts_G[group])


def _without_contrast(values: FloatArray, group: IntArray, attempts_G: IntArray) -> NDArray[np.bool_]:
    """Where there is nothing to compare: decided exactly, since a mean of equal floats need not equal them."""
    low_G, high_G = np.full(len(attempts_G), np.inf), np.full(len(attempts_G), -np.inf)
    np.minimum.at(low_G, group, values)
    np.maximum.at(high_G, group, values)
    return np.asarray(((attempts_G < 2) | (low_G == high_G))[group])
