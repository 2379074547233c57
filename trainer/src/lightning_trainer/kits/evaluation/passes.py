"""pass@k and pass^k of a task, from the number of its samples that succeeded. Pure functions."""

from __future__ import annotations

from math import comb


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
