"""What each credit assigner makes of the rewards of a simulated team whose contributions are known: see `team`.

`python bench/bench_credit.py` prints the table of docs/reference/algorithms.md; `measure` gives the same as
figures.
"""

from __future__ import annotations

import math
import statistics
from typing import get_args

import team as simulated
from figures import Figure

SEEDS = range(5)


def table() -> dict[tuple[str, str], tuple[float, float, list[float]]]:
    """By what is told and assigner: rank correlation, the rider's share, rollouts needed with each seed."""
    group = simulated.Team()
    return {
        (told, name): (
            *simulated.agreement(group, told, credit, SEEDS),
            [simulated.rollouts_needed(group, told, credit, seed) for seed in SEEDS],
        )
        for told in get_args(simulated.Told)
        for name, credit in simulated.assigners().items()
    }


def measure() -> list[Figure]:
    """Rollouts needed by each assigner, with how just it is beside them."""
    return [
        Figure(
            what=f"{name}, told by {told}: rollouts to {simulated.GOAL}",
            value=statistics.median(needed),
            unit="rollouts",
            note=f"rank correlation {correlation:.2f}, free rider {rider:.2f}; median of {len(needed)} seeds",
        )
        for (told, name), (correlation, rider, needed) in table().items()
    ]


def main() -> None:
    print("| told | credit | rank correlation | free rider | rollouts to 0.8 |\n|---|---|---|---|---|")
    for (told, name), (correlation, rider, needed) in table().items():
        low, middle, high = (_count(n) for n in (min(needed), statistics.median(needed), max(needed)))
        spread = middle if low == high else f"{middle} ({low} to {high})"
        print(f"| {told} | `{name}` | {correlation:.2f} | {rider:.2f} | {spread} |")


def _count(rollouts: float) -> str:
    most = simulated.LONGEST * simulated.GROUP * simulated.GROUPS
    return f"> {most:,}" if math.isinf(rollouts) else f"{rollouts:,.0f}"


if __name__ == "__main__":
    main()
