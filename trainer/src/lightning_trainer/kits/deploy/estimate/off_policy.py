"""Self-normalised importance sampling, as pure functions.

Axis: `_N` conversations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

FEWEST: Final = 100.0  # effective conversations below which there is no estimate, as at the gate
CLIP: Final = 20.0
MOST_CLIPPED: Final = 0.05  # largest share of the total weight that clipping may remove
_NORMAL: Final = 1.959963984540054  # 95 %


@dataclass(frozen=True, slots=True)
class OffPolicyEstimate:
    """The mean outcome of a candidate, estimated from conversations of another policy.

    Attributes:
        n: number of conversations.
        effective: effective sample size (Kish): the equivalent number of the candidate's own conversations.
        clipped: share of the total weight that clipping removed; the bias of the estimate is at most about as large.
        stable: mean outcome of the policy that answered.
        candidate: estimated mean outcome of the candidate; None, like the next three, if the estimate is uninformative.
        difference: candidate minus stable.
        low: lower end of its 95 % interval.
        high: upper end.
        refused: why the estimate is uninformative; None if it is not.
    """

    n: int
    effective: float
    clipped: float
    stable: float | None
    candidate: float | None = None
    difference: float | None = None
    low: float | None = None
    high: float | None = None
    refused: str | None = None


def estimate(
    outcomes_N: npt.ArrayLike,  # noqa: N803
    log_ratios_N: npt.ArrayLike,  # noqa: N803
    *,
    clip: float = CLIP,
    fewest: float = FEWEST,
) -> OffPolicyEstimate:
    """Estimate the mean outcome of a candidate from conversations that the stable policy answered.

    The weight of a conversation is the ratio of the probabilities of its sampled tokens under both policies, at most
    `clip` (Ionides, Truncated Importance Sampling, 2008). The weighted mean is divided by the sum of the weights
    (Hesterberg 1995), so it stays within the range of the outcomes. The interval of the difference follows from the
    delta method.

    Args:
        outcomes_N: (N,) outcome of each conversation.
        log_ratios_N: (N,) log-probability of its tokens under the candidate minus that under the stable policy.
        clip: largest weight.
        fewest: effective sample size below which the estimate is refused.
    """
    outcomes, ratios = np.asarray(outcomes_N, np.float64), np.asarray(log_ratios_N, np.float64)
    count = len(outcomes)
    if not count:
        return OffPolicyEstimate(0, 0.0, 0.0, None, refused="no conversation has both tokens and an outcome")
    logs = np.minimum(ratios, math.log(clip))
    weights = np.exp(logs)
    total = float(weights.sum())
    effective = total**2 / float(np.square(weights).sum()) if total > 0.0 else 0.0
    whole = np.exp(ratios - ratios.max())
    clipped = 1.0 - float(np.exp(logs - ratios.max()).sum() / whole.sum())
    stable = float(outcomes.mean())
    if (refused := _refusal_reason(effective, clipped, fewest)) is not None:
        return OffPolicyEstimate(count, effective, clipped, stable, refused=refused)
    candidate = float((weights * outcomes).sum()) / total
    influence = weights * (outcomes - candidate) / (total / count) - (outcomes - stable)
    half = _NORMAL * float(influence.std(ddof=1)) / math.sqrt(count)
    difference = candidate - stable
    return OffPolicyEstimate(
        count, effective, clipped, stable, candidate, difference, difference - half, difference + half
    )


def _refusal_reason(effective: float, clipped: float, fewest: float) -> str | None:
    if effective < fewest:
        return f"the effective sample size is {effective:.1f}; at least {fewest:g} is needed"
    if clipped > MOST_CLIPPED:
        return f"{100 * clipped:.0f} % of the weight was clipped; at most {100 * MOST_CLIPPED:.0f} % is allowed"
    return None
