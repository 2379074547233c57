"""What an update by forks of rollouts is worth, next to groups of rollouts at equal cost: see `worlds` and `forked`.

`python bench/bench_forks.py` prints the tables of docs/how-to/counterfactual.md: updates, then learning with every
method at the best of five rates. `measure` gives the same as figures.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence

import forked
from figures import Figure, choose_size
from forked import Step
from team import assigners
from worlds import Expedition, Turns, World

WORLDS = tuple(kind(noise=noise) for kind in (Turns, Expedition) for noise in (0.1, 0.0))
RATES = (24.0, 48.0, 96.0, 192.0, 384.0)


def updates() -> dict[str, Step]:
    """Return the methods whose updates are compared."""
    return {
        "GRPO, groups of 8": forked.groups(assigners()["identical"]),
        "GRPO, half of these groups": forked.groups(assigners()["identical"], budget=forked.BUDGET / 2),
        "`counterfactual`": forked.forks(),
        "`counterfactual`, `group = false`": forked.forks(group=False),
        "the same, fresh": forked.forks(group=False, coupled=False),
        "the same, not averaged": forked.forks(group=False, average=False),
        "`alternatives = 5`": forked.forks(alternatives=5),
        '`fork_at = "evenly"`': forked.forks("evenly"),
        '`fork_at = "entropy"`': forked.forks("entropy"),
        '`fork_at = "disagreement"`': forked.forks("disagreement"),
        "VinePPO, 3 draws a state": forked.vine(3),
    }


def learners() -> dict[str, Step]:
    """Return the methods whose learning is compared, each at its best rate."""
    chosen = ("GRPO, groups of 8", "`counterfactual`", "`counterfactual`, `group = false`", "VinePPO, 3 draws a state")
    return {name: updates()[name] for name in chosen}


def describe(world: World) -> str:
    return f"{type(world).__name__}, noise {world.noise:g}"


def measured_updates(seeds: Sequence[int]) -> Iterator[tuple[str, Mapping[str, forked.Update]]]:
    """Yield, by world, the update of each method."""
    for world in WORLDS:
        exact = forked.gradient(world)
        yield describe(world), {name: forked.update(world, step, seeds, exact) for name, step in updates().items()}


def measured_learning(
    seeds: Sequence[int], rates: Sequence[float], worlds: Sequence[World] = WORLDS
) -> Iterator[tuple[str, str, forked.Learning]]:
    """Yield world, method, and what it needed at its best rate."""
    for world in worlds:
        for name, step in learners().items():
            yield describe(world), name, forked.tune(world, step, seeds, rates)


def measure() -> list[Figure]:
    """Cosines of updates with the exact gradient, and continuations until the goal at each method's best rate."""
    seeds, learning_seeds = range(choose_size(24, 2)), range(choose_size(5, 1))
    return [
        Figure(
            what=f"{world}, {name}: cosine of an update with the gradient",
            value=found.cosine,
            unit="",
            note=f"free rider {found.rider:.2f}, {found.drawn:.0f} calls drawn; mean of {len(seeds)} seeds",
        )
        for world, methods in measured_updates(seeds)
        for name, found in methods.items()
    ] + [
        Figure(
            what=f"{world}, {name}: continuations to {forked.GOAL}",
            value=statistics.median(found.continuations),
            unit="continuations",
            note=f"rate {found.rate:g}, the best of those tried; median of {len(learning_seeds)} seeds",
        )
        for world, name, found in measured_learning(
            learning_seeds, choose_size(RATES, RATES[-1:]), choose_size(WORLDS, WORLDS[:1])
        )
    ]


def main() -> None:
    head = ["method", *(f"{describe(world)}: cosine, free rider, calls" for world in WORLDS)]
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
    columns = [methods for _, methods in measured_updates(range(24))]
    for name in updates():
        cells = [f"{its[name].cosine:.2f}, {its[name].rider:.2f}, {its[name].drawn:.0f}" for its in columns]
        print(f"| {name} | {' | '.join(cells)} |")
    head = ["world", "method", "best rate", "continuations to 0.8", "calls drawn"]
    print(f"\n| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for world, name, found in measured_learning(range(5), RATES):
        print(f"| {world} | {name} | {found.rate:g} | {_spread(found.continuations)} | {_spread(found.drawn)} |")
        sys.stdout.flush()


def _spread(numbers: Sequence[float]) -> str:
    least, middle, most = (_count(n) for n in (min(numbers), statistics.median(numbers), max(numbers)))
    return f"{middle} ({least} to {most})"


def _count(number: float) -> str:
    return "never" if math.isinf(number) else f"{number:,.0f}"


if __name__ == "__main__":
    main()
