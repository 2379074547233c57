"""What forks of rollouts tell, beside groups of rollouts at equal cost, in two small worlds: see `worlds` and `forked`.

`python bench/bench_forks.py` prints the first table of docs/how-to/counterfactual.md, `--equal-calls` the second
one: what an engine drew and what records gave until the goal. `measure` gives the first as figures, without noise.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Iterator, Sequence

import forked
from figures import Figure
from forked import Measured, Step
from team import assigners
from worlds import Expedition, Turns

SEEDS = range(5)
NOISES = (0.1, 0.02, 0.0)
WORLDS = (Turns, Expedition)


def ways() -> dict[str, Step]:
    """Return what is compared at each noise."""
    return {
        "groups of 8, `identical` (GRPO)": forked.groups(assigners()["identical"]),
        "`counterfactual`, fresh, not averaged": forked.forks(coupled=False, average=False),
        "`counterfactual`, fresh": forked.forks(coupled=False),
        "`counterfactual`, coupled, not averaged": forked.forks(average=False),
        "`counterfactual`": forked.forks(),
        "`alternatives = 5`": forked.forks(alternatives=5),
        "`alternatives = 7`": forked.forks(alternatives=7),
        '`fork_at = "evenly"`': forked.forks("evenly"),
        '`fork_at = "entropy"`': forked.forks("entropy"),
        '`fork_at = "disagreement"`': forked.forks("disagreement"),
        "`tree-grpo`": forked.trees(trees_in_group=4, branches=3),
        "VinePPO, 3 draws a state": forked.vine(3),
    }


def table(noises: Sequence[float] = NOISES) -> Iterator[tuple[str, float, str, Measured]]:
    """Measure every way in both worlds; and all assigners, with noise."""
    for kind in WORLDS:
        for noise in noises:
            for name, step in ways().items():
                yield kind.__name__, noise, name, forked.measured(kind(noise=noise), step, SEEDS)
    for kind in WORLDS:
        for name, credit in assigners().items():
            if name != "identical":
                step = forked.groups(credit)
                yield kind.__name__, 0.1, f"groups of 8, `{name}`", forked.measured(kind(noise=0.1), step, SEEDS)


def equal_calls(noises: Sequence[float] = (0.1, 0.0)) -> Iterator[tuple[str, float, str, Measured]]:
    """Measure the chosen ways by calls: each draws tokens once, whichever continuation it is of."""
    chosen = {
        "groups of 8, `identical` (GRPO)": forked.groups(assigners()["identical"]),
        "`counterfactual`": forked.forks(),
        "`shapley`": forked.coalitions_of(),
        "`shapley`, `orders = 8`": forked.coalitions_of(count=8),
        "`tree-grpo`": forked.trees(trees_in_group=4, branches=3),
    }
    for kind in WORLDS:
        for noise in noises:
            for name, step in chosen.items():
                yield kind.__name__, noise, name, forked.measured(kind(noise=noise), step, SEEDS[:3])


def measure() -> list[Figure]:
    """Continuations until the goal, with how just each way is beside them."""
    return [
        Figure(
            what=f"{world}, {name}: continuations to {forked.GOAL}",
            value=statistics.median(found.continuations),
            unit="continuations",
            note=f"rank correlation {found.correlation:.2f}, rider {found.rider:.2f}; median of {len(SEEDS)} seeds",
        )
        for world, _, name, found in table((0.0,))
    ]


def main() -> None:
    if "--equal-calls" in sys.argv:
        _print_calls()
        return
    head = ["world", "noise", "way", "rank correlation", "free rider", "continuations to 0.8", "calls drawn"]
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for world, noise, name, found in table():
        parts = [found.continuations, found.drawn]
        costs = [f"{_count(statistics.median(its))} ({_count(min(its))} to {_count(max(its))})" for its in parts]
        print(f"| {world} | {noise:g} | {name} | {found.correlation:.2f} | {found.rider:.2f} | {' | '.join(costs)} |")
        sys.stdout.flush()


def _print_calls() -> None:
    head = ["world", "noise", "way", "rank correlation", "free rider", "calls drawn to 0.8", "given", "saved"]
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for world, noise, name, found in equal_calls():
        drawn, given = statistics.median(found.drawn), statistics.median(found.given)
        its, least = _count(drawn), min(found.drawn)
        its += "" if math.isinf(least) else f" ({_count(least)} to {_count(max(found.drawn))})"
        costs = [its, "", ""] if math.isinf(drawn) else [its, _count(given), f"{given / (drawn + given):.0%}"]
        told = [world, f"{noise:g}", name, f"{found.correlation:.2f}", f"{found.rider:.2f}", *costs]
        print(f"| {' | '.join(told)} |")
        sys.stdout.flush()


def _count(number: float) -> str:
    return "never" if math.isinf(number) else f"{number:,.0f}"


if __name__ == "__main__":
    main()
