"""Advantages: how much better an attempt, or one of its calls, did than its group. Pure functions on float64 arrays.

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

_ROUNDING = 1e-14  # relative; sums of the same floats in another order differ by less
_LARGE = 1e100  # squares of larger values, and their sums, may not be finite
EPSILON = 1e-4  # GRPO's paper has none; TRL adds 1e-4, verl 1e-6. It only matters for groups with almost equal returns.


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
    # An attempt is a transition whose value is the return, so one formula serves both.
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
    their mean squared distance from the baseline, times n / (n - 1) for n attempts. If all calls of an attempt have one
    value (credit `identical`), both are the mean and sample variance of the returns, and the result equals that of
    `group_advantages`. If values differ within attempts, their spread is part of the deviation: with the deviation of
    the attempts' means alone, equal means would be divided by `eps`.

    Args:
        values_M: (M,) credit of each transition.
        attempt_M: (M,) the attempt of each.
        group_M: (M,) the group of that attempt.
        agent_M: (M,) the calling agent. If given, each agent is compared with itself, over the attempts in which it
            called; None compares all calls of the group.
        normalise: whether to divide by the deviation.
        eps: added to the deviation, in units of the value.

    Returns:
        (M,) advantages. Their mean over each attempt sums to 0 over the attempts of a group (of an agent in a group).
        Exactly 0 if there is only one attempt to compare, and if all values are equal.

    Raises:
        ValueError: lengths differ, a value is not finite, or an attempt is in two groups.
    """
    values = _check_arrays(values_M, attempt_M, group_M, agent_M)
    if not len(values):
        return values
    attempt, group = _number_ids(attempt_M), _number_ids(group_M)
    if len(np.unique(np.stack([attempt, group]), axis=1).T) != attempt.max() + 1:
        raise ValueError("an attempt is in two groups")
    if agent_M is not None:
        agent = _number_ids(agent_M)
        group, attempt = _pairs(group, agent), _pairs(attempt, agent)

    attempts_G, weights = _weights(attempt, group)
    still = _without_contrast(values, group, attempts_G)
    unit_G = _units(values, group, len(attempts_G))
    values = values / unit_G[group]
    baseline_G = np.bincount(group, weights * values)
    centred = values - baseline_G[group]
    centred[still] = 0.0
    if not normalise:
        return np.asarray(centred * unit_G[group])
    variance_G = np.bincount(group, weights * centred**2) * attempts_G / np.maximum(attempts_G - 1, 1)
    return np.asarray(centred / (np.sqrt(variance_G) + eps / unit_G)[group])


def leave_one_out(
    values_M: FloatArray | Sequence[float],
    attempt_M: Ids | range,
    group_M: Ids,
    *,
    agent_M: Ids | None = None,
    **_: Any,
) -> FloatArray:
    """Compare each call with the mean of the other attempts of its group (RLOO, arXiv 2402.14740, section 3).

    A_i = R_i - sum of R_j over j != i / (n - 1): a baseline that the attempt itself has no part in. Attempts count
    once, with the mean of their calls' values.

    Args:
        values_M: (M,) credit of each transition.
        attempt_M: (M,) the attempt each belongs to.
        group_M: (M,) the group of that attempt.
        agent_M: (M,) the agent that called, compared with itself; None compares all calls of the group.

    Returns:
        (M,) advantages; exactly 0 where there is no other attempt, and where all values are equal.

    Raises:
        ValueError: as `transition_advantages`.
    """
    centred = transition_advantages(values_M, attempt_M, group_M, agent_M=agent_M, normalise=False)
    if not len(centred):
        return centred
    attempt, group = _number_ids(attempt_M), _number_ids(group_M)
    if agent_M is not None:
        agent = _number_ids(agent_M)
        group, attempt = _pairs(group, agent), _pairs(attempt, agent)
    attempts_G, _weight = _weights(attempt, group)
    # With b the mean of all n and m the attempt's own, the others' mean is b - (m - b) / (n - 1).
    own_mean = (np.bincount(attempt, centred) / np.bincount(attempt))[attempt]
    return np.asarray(centred + own_mean / np.maximum(attempts_G - 1, 1)[group])


def keep_values(values_M: FloatArray | Sequence[float], *_: Any, **__: Any) -> FloatArray:
    """(M,) the values unchanged: for algorithms whose baseline is the whole batch, or a value head."""
    return np.asarray(values_M, dtype=np.float64)


def whiten(
    values_M: FloatArray | Sequence[float],
    weights_M: FloatArray | Sequence[float] | None = None,
    *,
    agent_M: Ids | None = None,
    eps: float = 1e-8,
) -> FloatArray:
    """Centre values on the mean of the whole batch and divide by its deviation (REINFORCE++, arXiv 2501.03262).

    A = (v - mean) / sqrt(var + eps), equation 7. After the subtraction of group means this is its variant with
    baseline (section 3.3). Weights say how often a value counts: 1 / calls of its attempt makes the attempt the unit,
    the number of its tokens the token, as verl has it.

    Args:
        values_M: (M,) values.
        weights_M: (M,) how often each counts, 0 or more; None: once. The variance is the sample's: over sum(w) - 1.
        agent_M: (M,) entries of different agents are not compared; None compares all.
        eps: added to the variance.

    Returns:
        (M,) values whose weighted mean is 0 and whose weighted variance is 1, for each agent. Exactly 0 where all that
        count are equal, or count once or less together.

    Raises:
        ValueError: lengths differ, a value is not finite, or a weight is negative.
    """
    values = np.asarray(values_M, dtype=np.float64)
    weights = np.ones_like(values) if weights_M is None else np.asarray(weights_M, dtype=np.float64)
    agent = np.zeros(len(values), np.int64) if agent_M is None or not len(values) else _number_ids(agent_M)
    if not values.ndim == weights.ndim == 1 or not len(values) == len(weights) == len(agent):
        raise ValueError(f"values, weights and agents differ in length: {len(values)}, {len(weights)}, {len(agent)}")
    if not np.isfinite(values).all() or not np.isfinite(weights).all() or (weights < 0).any():
        raise ValueError("values must be finite, and weights finite and not negative")
    if not len(values):
        return values
    total_A = np.bincount(agent, weights)
    unit_A = _units(values, agent, len(total_A))
    values = values / unit_A[agent]
    mean_A = np.bincount(agent, weights * values) / np.where(total_A > 0, total_A, 1.0)
    # What was centred before has a mean of rounding errors; subtracting it would turn exact zeros into noise.
    size_A = np.bincount(agent, weights * abs(values)) / np.where(total_A > 0, total_A, 1.0)
    mean_A[abs(mean_A) <= 1e-13 * size_A] = 0.0
    centred = values - mean_A[agent]
    variance_A = np.bincount(agent, weights * centred**2) / np.maximum(total_A - 1.0, 1e-300)
    counted = weights > 0
    low_A, high_A = _extremes(values[counted], agent[counted], len(total_A))
    still_A = (total_A <= 1.0) | (low_A == high_A)
    return np.asarray(np.where(still_A[agent], 0.0, centred / np.sqrt(variance_A + eps / unit_A / unit_A)[agent]))


def generalised_advantages(
    rewards_RT: FloatArray, values_RT: FloatArray, mask_RT: NDArray[Any], *, gamma: float = 1.0, lam: float = 1.0
) -> tuple[FloatArray, FloatArray]:
    """Estimate advantages of tokens by a value function (GAE, arXiv 1506.02438, equations 11 to 16).

    delta_t = r_t + gamma V(s_t+1) - V(s_t), A_t = delta_t + gamma lam A_t+1, over the tokens that the policy sampled:
    tokens in between, which it did not sample, are no steps, as in verl. After the last one the value is 0.

    Args:
        rewards_RT: (R, T) reward that came with each token.
        values_RT: (R, T) value of the state in which each token was sampled.
        mask_RT: (R, T) which tokens were sampled.
        gamma: discount of one token.
        lam: 1 compares with the value alone, smaller ones trust it to say what comes after.

    Returns:
        (R, T) advantages and (R, T) returns, the values' targets: advantages + values. 0 at other tokens.

    Raises:
        ValueError: shapes differ.
    """
    rewards, values = np.asarray(rewards_RT, np.float64), np.asarray(values_RT, np.float64)
    mask = np.asarray(mask_RT, np.bool_)
    if rewards.ndim != 2 or not rewards.shape == values.shape == mask.shape:
        raise ValueError(f"rewards, values and mask differ in shape: {rewards.shape}, {values.shape}, {mask.shape}")
    advantages = np.zeros_like(rewards)
    next_value, ahead = np.zeros(len(rewards)), np.zeros(len(rewards))
    for t in range(rewards.shape[1] - 1, -1, -1):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        ahead = np.where(mask[:, t], delta + gamma * lam * ahead, ahead)
        next_value = np.where(mask[:, t], values[:, t], next_value)
        advantages[:, t] = np.where(mask[:, t], ahead, 0.0)
    return advantages, np.where(mask, advantages + values, 0.0)


def _check_arrays(
    values_M: FloatArray | Sequence[float], attempt_M: Ids | range, group_M: Ids, agent_M: Ids | None
) -> FloatArray:
    """(M,) the values as an array. Raises ValueError if lengths differ or a value is not finite."""
    values = np.asarray(values_M, dtype=np.float64)
    lengths = {len(values), len(attempt_M), len(group_M), len(values if agent_M is None else agent_M)}
    if values.ndim != 1 or len(lengths) != 1:
        raise ValueError(f"values, attempts, groups and agents must be lists of one length, not of {sorted(lengths)}")
    if not np.isfinite(values).all():
        raise ValueError(
            f"value {values[~np.isfinite(values)][0]} at {int(np.argmin(np.isfinite(values)))}: not finite"
        )
    return values


def _number_ids(ids: Ids | range) -> IntArray:
    """(M,) ids as numbers from 0."""
    return np.asarray(np.unique(np.asarray(ids), return_inverse=True)[1], dtype=np.int64).reshape(-1)


def _pairs(left: IntArray, right: IntArray) -> IntArray:
    """(M,) one number for each pair that occurs."""
    return _number_ids(left * (right.max() + 1) + right)


def _weights(attempt: IntArray, group: IntArray) -> tuple[IntArray, FloatArray]:
    """Number of attempts of each group, and weights of transitions.

    Attempts have equal weight, shared by their calls.
    """
    _, first = np.unique(attempt, return_index=True)
    attempts_G = np.bincount(group[first], minlength=int(group.max()) + 1)
    return attempts_G, 1.0 / (np.bincount(attempt)[attempt] * attempts_G[group])


def _without_contrast(values: FloatArray, group: IntArray, attempts_G: IntArray) -> NDArray[np.bool_]:
    """Whether there is nothing to compare: all values are equal, up to the rounding of sums."""
    low_G, high_G = _extremes(values, group, len(attempts_G))
    rounding_G = _ROUNDING * np.maximum(abs(low_G), abs(high_G))
    return np.asarray(((attempts_G < 2) | (high_G - low_G <= rounding_G))[group])


def _units(values: FloatArray, group: IntArray, groups: int) -> FloatArray:
    """(G,) a power of two near the largest value of each group where squares would overflow, else 1.

    A power of two, so that dividing rounds nothing.
    """
    largest_G = np.zeros(groups)
    np.maximum.at(largest_G, group, abs(values))
    return np.where(largest_G > _LARGE, np.exp2(np.frexp(largest_G)[1] - 1.0), 1.0)


def _extremes(values: FloatArray, group: IntArray, groups: int) -> tuple[FloatArray, FloatArray]:
    """(G,) the lowest and the highest value of each group."""
    low_G, high_G = np.full(groups, np.inf), np.full(groups, -np.inf)
    np.minimum.at(low_G, group, values)
    np.maximum.at(high_G, group, values)
    return low_G, high_G
