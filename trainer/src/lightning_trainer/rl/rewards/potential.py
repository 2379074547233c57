"""Rewards along the way that leave the best policy where it is (Ng, Harada and Russell, 1999).

A bonus for what looks good on the way can be earned again and again, and then the best policy is another. Differences
of a potential can't: F(s, s') = gamma * phi(s') - phi(s), with phi = 0 where the attempt ends, adds up to -phi(s) from
any state on, whatever is done there. Theorem 1 of the paper: this is the only form of which that holds for every task.
"""

from __future__ import annotations

from collections.abc import Sequence


def shaping(potentials: Sequence[float], steps: Sequence[int], gamma: float) -> list[float]:
    """Return the reward of each decision of an attempt.

    Args:
        potentials: (T,) of the states in which decisions were made.
        steps: (T,) when, in the units of the discount, increasing; decisions may lie several steps apart.
        gamma: discount of one step, the same as the credit's.

    Returns:
        (T,) gamma**(steps[t + 1] - steps[t]) * potentials[t + 1] - potentials[t]; the potential after the last is 0.
    """
    after = [*potentials[1:], 0.0]
    apart = [later - now for now, later in zip(steps, [*steps[1:], *steps[-1:]], strict=True)]
    return [gamma**wait * later - now for now, later, wait in zip(potentials, after, apart, strict=True)]
