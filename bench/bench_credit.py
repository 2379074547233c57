"""What each credit assigner makes of the rewards of a simulated team whose contributions are known: see `team`.

`python bench/bench_credit.py` prints the table of docs/reference/algorithms.md, with every assigner at the best of five
rates; `measure` gives the same as figures.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import get_args

import team as simulated
from figures import Figure, choose_size

SEEDS = range(5)
RATES = (6.0, 12.0, 24.0, 48.0, 96.0)

COSINES = range(24)

Row = tuple[float, float, float, float, list[float]]


def table(seeds: Sequence[int] = SEEDS, rates: Sequence[float] = RATES) -> dict[tuple[str, str], Row]:
    """By reward and assigner: cosine, rank correlation, the rider's share, the best rate, and rollouts by seed."""
    team = simulated.Team()
    return {
        (told, name): (
            simulated.cosine(team, told, credit, COSINES[: 5 * len(seeds)]),
            *simulated.agreement(team, told, credit, seeds),
            *tune(told, credit, seeds, rates),
        )
        for told in get_args(simulated.Told)
        for name, credit in simulated.assigners().items()
    }


def tune(told: str, credit: object, seeds: Sequence[int], rates: Sequence[float]) -> tuple[float, list[float]]:
    """Return the rate with the fewest rollouts in the median, and the rollouts of each seed."""
    needed = {
        rate: [simulated.rollouts_to_goal(simulated.Team(), told, credit, seed, rate) for seed in seeds]
        for rate in rates
    }
    best = min(needed, key=lambda rate: statistics.median(needed[rate]))
    return best, needed[best]


def measure() -> list[Figure]:
    """Rollouts needed by each assigner, with how just it is next to them."""
    found = table(SEEDS[: choose_size(5, 1)], choose_size(RATES, RATES[-1:]))
    return [
        Figure(
            what=f"{name}, reward for {told}: rollouts to {simulated.GOAL}",
            value=statistics.median(needed),
            unit="rollouts",
            note=f"cosine {cosine:.2f}, rank {correlation:.2f}, rider {rider:.2f}; rate {rate:g}, {len(needed)} seeds",
        )
        for (told, name), (cosine, correlation, rider, rate, needed) in found.items()
    ]


def main() -> None:
    head = ("reward for", "credit", "cosine", "rank correlation", "free rider", "best rate", "rollouts to 0.8")
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for (told, name), (cosine, correlation, rider, rate, needed) in table().items():
        low, middle, high = (_count(n) for n in (min(needed), statistics.median(needed), max(needed)))
        spread = middle if low == high else f"{middle} ({low} to {high})"
        print(
            f"| {told} | `{name}` | {cosine:.2f} | {correlation:.2f} | {rider:.2f} | {rate:g} | {spread} |", flush=True
        )


def _count(rollouts: float) -> str:
    most = simulated.LONGEST * simulated.GROUP * simulated.GROUPS
    return f"> {most:,}" if math.isinf(rollouts) else f"{rollouts:,.0f}"


if __name__ == "__main__":
    main()
