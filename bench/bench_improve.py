"""How often `improve` keeps a candidate that is no better than the base, and how often it finds one that is.

A simulated search has four methods, none or one of which raises the success rate by a constant, as far as the task
allows. Rewards are 0 or 1, four samples of each task, and tasks differ in difficulty. One half of the held-out tasks
chooses. `before`: only the other half decides, with one comparison for each agent. `now`: all of them decide, with
intervals that allow for the choice. Both are measured on the same searches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from figures import Figure, choose_size

from lightning_trainer.kits.improve.decision import decide
from lightning_trainer.kits.improve.halving import MethodResult, Rewards, Spending, States, halve, rung_count
from lightning_trainer.kits.improve.selection import StatesOfAgent, equivalent_comparisons

METHODS = ("prompts", "sft", "rl", "distil")
HELPS = "rl"
SAMPLES = 4
FRESH = 1000  # the first seed; smaller ones were used while this was made
NULL, POWER = choose_size(1000, 2), choose_size(300, 2)  # searches of each kind
Choices = Callable[[Sequence[str]], float]


class SimulatedSearch:
    """One search: each state is measured once on all held-out tasks, of which the first half chooses."""

    def __init__(self, seed: int, tasks: int, gain: float, agents: int) -> None:
        self.numbers = np.random.default_rng(seed)
        self.tasks, self.half, self.gain = tasks, tasks // 2, gain
        self.easy = self.numbers.beta(2, 2, tasks)
        # each method changes each task a little, without a gain in the mean
        self.shift = {
            (agent, method): self.numbers.normal(0, 0.1, tasks) for agent in range(agents) for method in METHODS
        }
        self.base = self.rewards({})
        self.measured: dict[tuple[int, str, int], np.ndarray] = {}
        self.searches = {f"{agent}": self.search(agent) for agent in range(agents)}
        self.candidates = {
            agent: max(found, key=lambda name: found[name].gain)
            for agent, found in self.searches.items()
            if max(each.gain for each in found.values()) > 0
        }

    def rewards(self, methods: dict[int, str]) -> np.ndarray:
        rates = self.easy.copy()
        for agent, method in methods.items():
            rates += self.gain * (method == HELPS) + self.shift[agent, method]
        return self.numbers.binomial(SAMPLES, rates.clip(0, 1)) / SAMPLES

    def search(self, agent: int) -> dict[str, MethodResult]:
        states: dict[tuple[str, int], Rewards] = {}

        def measure(method: str, rung: int) -> tuple[Rewards, States]:
            found = self.measured[agent, method, rung] = self.rewards({agent: method})
            states[method, rung] = dict(enumerate(found[: self.half]))
            return dict(enumerate(self.base[: self.half])), states

        return halve(METHODS, 12_000, lambda _m, _r, limit: Spending(tokens=limit, changed=True), measure)

    def rewards_of(self, agents: Sequence[str]) -> np.ndarray:
        if len(agents) > 1:
            return self.rewards({int(agent): self.candidates[agent] for agent in agents})
        method = self.candidates[agents[0]]
        best = self.searches[agents[0]][method].best
        assert best is not None
        return self.measured[int(agents[0]), method, best.rung]

    def choices(self, agents: Sequence[str]) -> float:
        possible = len(METHODS) * rung_count(len(METHODS))
        tried = [
            StatesOfAgent(
                states=[s.rewards for each in self.searches[agent].values() for s in each.stages], possible=possible
            )
            for agent in agents
        ]
        return equivalent_comparisons(dict(enumerate(self.base[: self.half])), tried, self.tasks - self.half)

    def kept(self, first: int, choices: Choices) -> list[str]:
        """Return the methods that are kept if the tasks from `first` on decide."""
        decision = decide(
            list(self.candidates),
            lambda agents: (dict(enumerate(self.base[first:])), dict(enumerate(self.rewards_of(agents)[first:]))),
            choices=choices,
        )  # fmt: skip
        return [self.candidates[agent] for agent in decision.kept]


@dataclass(frozen=True, slots=True)
class Rates:
    """Shares of searches: `before` and `now`, and `same` if the tasks of the choice decide without a correction."""

    before: float
    now: float
    same: float


def rates(seeds: Sequence[int], tasks: int, gain: float, agents: int = 1) -> Rates:
    """Return in which share of searches a candidate is kept: any if nothing helps, otherwise the one that helps."""
    found = []
    for seed in seeds:
        search = SimulatedSearch(seed, tasks, gain, agents)
        ways = search.kept(search.half, len), search.kept(0, search.choices), search.kept(0, len)
        found.append([HELPS in kept if gain else bool(kept) for kept in ways])
    return Rates(*np.mean(found, axis=0).tolist())


def measure() -> list[Figure]:
    figures = []
    for tasks in (40, 100):
        for agents in (1, 2):
            found = rates(range(FRESH, FRESH + NULL), tasks, 0.0, agents)
            figures.append(
                Figure(
                    what=f"useless candidate kept, {tasks} held-out tasks, agents: {agents}", value=100 * found.now,
                    unit="%", goal=2.5,
                    note=f"{NULL} searches; before {100 * found.before:.1f} %; all tasks uncorrected"
                    f" {100 * found.same:.1f} %",
                )
            )  # fmt: skip
        for gain in (0.1, 0.2):
            found = rates(range(FRESH, FRESH + POWER), tasks, gain)
            figures.append(
                Figure(
                    what=f"a method that gains {gain} kept, {tasks} held-out tasks", value=100 * found.now, unit="%",
                    more_is_better=True, note=f"{POWER} searches; before {100 * found.before:.0f} %",
                )
            )  # fmt: skip
    return figures
