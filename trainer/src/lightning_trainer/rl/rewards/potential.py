"""Intermediate rewards that do not change the best policy (Ng, Harada and Russell, 1999).

A bonus for intermediate results can be earned again and again, and then another policy is best. Differences of a
potential cannot: F(s, s') = gamma * phi(s') - phi(s), with phi = 0 at the end of the attempt, sums to -phi(s) from any
state on, whatever is done there. Theorem 1 of the paper: only this form has the property for every task.
"""

from __future__ import annotations

from collections.abc import Sequence


def shaping(potentials: Sequence[float], steps: Sequence[int], gamma: float) -> list[float]:
    """Return the reward of each decision of an attempt.

    Args:
        potentials: (T,) of the states in which decisions were made.
        steps: (T,) when, in the units of the discount, increasing; decisions may be several steps apart.
        gamma: discount of one step, the same as the credit's.

    Returns:
        (T,) gamma**(steps[t + 1] - steps[t]) * potentials[t + 1] - potentials[t]; the potential after the last is 0.
    """
    after = [*potentials[1:], 0.0]
    apart = [later - now for now, later in zip(steps, [*steps[1:], *steps[-1:]], strict=True)]
    return [gamma**wait * later - now for now, later, wait in zip(potentials, after, apart, strict=True)]
