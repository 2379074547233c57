"""Learning in small worlds from attempts and their forks, through the functions that training uses.

A step has a budget in continuations: an attempt from its beginning costs 1, a fork the share of the record's calls that
it still had to make. How many calls were drawn anew is counted beside it, for that is what the engine does.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from team import GOAL, Policy, rank_correlation
from worlds import Seen, World

from lightning_spans.schema.replays import FORKED, REPLAYED
from lightning_spans.schema.rewards import Reward
from lightning_spans.schema.transitions import Tokens, Transition
from lightning_trainer.rl.account import Account
from lightning_trainer.rl.advantages import EPSILON, leave_one_out, transition_advantages
from lightning_trainer.rl.batch.calls import FINAL, Calls
from lightning_trainer.rl.batch.comparison import compare_calls
from lightning_trainer.rl.batch.sharing import Episode
from lightning_trainer.rl.credit.counterfactual import Cells, counterfactual
from lightning_trainer.rl.credit.played import Fork, PlayedAttempt
from lightning_trainer.rl.credit.values import levels_of
from lightning_trainer.rl.fork_points import Where, candidates, choose

BUDGET, LONGEST = 32.0, 50  # continuations in a step, and steps


@dataclass(frozen=True)
class Call:
    """One call: who saw what, what it did, whether that came from the record, how likely it was, and its worth."""

    seen: Seen
    action: bool
    replayed: bool
    chance: float
    truth: float


@dataclass(frozen=True)
class Run:
    """An attempt: its calls, what it met, what it earned, noise included, and what that cost in continuations."""

    name: str
    scene: object
    calls: tuple[Call, ...]
    earned: float
    cost: float = 1.0
    fork: Fork | None = None
    group: str = ""

    @property
    def given(self) -> int:
        return sum(call.replayed for call in self.calls)

    @property
    def actions(self) -> list[bool]:
        return [call.action for call in self.calls]

    @property
    def drawn(self) -> int:
        return sum(not call.replayed for call in self.calls)

    def played(self) -> PlayedAttempt:
        ids = {"rollout_id": self.name, "attempt_id": self.name}
        transitions = [
            Transition(
                agent=call.seen[0],
                turn=turn,
                span_id=f"{self.name}-{turn}",
                request={"messages": [{"role": "user", "content": repr(call.seen)}]},
                tokens=Tokens((0,), (int(call.action),), (math.log(call.chance),)),
                sampling={REPLAYED: "yes"}
                if call.replayed
                else {FORKED: "yes"}
                if self.fork and self.fork.call == turn
                else {},
                **ids,
            )
            for turn, call in enumerate(self.calls)
        ]
        return PlayedAttempt(
            attempt_id=self.name, transitions=transitions, earned=self.earned, group=self.group, fork=self.fork
        )


def play(
    world: World,
    policy: Policy,
    name: str,
    numbers: np.random.Generator,
    *,
    scene: object = None,
    record: Run | None = None,
    call: int = 0,
    coupled: bool = True,
    group: str = "",
) -> Run:
    """Play an attempt, or a fork of one: the record's calls up to one of them, and from there on anew.

    A request after the fork that is the same as one in the record's rest is answered as there, where coupled: the
    oldest such, each once.
    """
    scene = record.scene if record is not None else world.scene(numbers) if scene is None else scene
    rest = [(c.seen, c.action) for c in record.calls[call + 1 :]] if record is not None and coupled else []
    actions: list[bool] = []
    kept: list[tuple[Seen, bool]] = []
    while (seen := world.seen(scene, actions)) is not None:
        place = len(actions)
        found = next((n for n, (asked, _) in enumerate(rest) if asked == seen), None) if place > call else None
        if record is not None and place < call:
            action, replayed = record.calls[place].action, True
        elif found is not None:
            action, replayed = rest.pop(found)[1], True
        else:
            action, replayed = bool(numbers.random() < policy.good(*seen)), False
        actions.append(action)
        kept.append((seen, replayed))
    total = sum(world.gain(scene, actions[: n + 1]) for n in range(len(actions)))
    truths = world.truth(policy, scene, actions)
    good = [policy.good(*seen) for seen, _ in kept]
    chances = [chance if action else 1.0 - chance for chance, action in zip(good, actions, strict=True)]
    return Run(
        name=name,
        scene=scene,
        calls=tuple(Call(s, a, r, c, t) for (s, r), a, c, t in zip(kept, actions, chances, truths, strict=True)),
        earned=total + float(numbers.normal(0.0, world.noise)),
        cost=1.0 if record is None else max(1, len(actions) - call) / len(record.calls),
        fork=None if record is None else Fork(record.name, call),
        group=group,
    )


@dataclass
class StepData:
    """What a step gave: calls with their advantages, and its costs."""

    calls: list[Call] = field(default_factory=list)
    advantages: np.ndarray = field(default_factory=lambda: np.zeros(0))
    continuations: float = 0.0
    drawn: int = 0
    given: int = 0

    @classmethod
    def of(cls, runs: Sequence[Run], advantages: Sequence[Sequence[float]]) -> StepData:
        """Keep the calls that have an advantage, NaN being none."""
        pairs = [
            (call, advantage)
            for run, its in zip(runs, advantages, strict=True)
            for call, advantage in zip(run.calls, its, strict=True)
            if not math.isnan(advantage)
        ]
        return cls(
            [call for call, _ in pairs],
            np.array([advantage for _, advantage in pairs]),
            sum(run.cost for run in runs),
            sum(run.drawn for run in runs),
            sum(run.given for run in runs),
        )


def play_groups(world: World, policy: Policy, numbers: np.random.Generator, groups: int, size: int) -> list[Run]:
    """Play groups of attempts, each group in one scene, as the rollouts of a task are."""
    runs: list[Run] = []
    for number in range(groups):
        scene = world.scene(numbers)
        names = [f"g{number}-{n}" for n in range(size)]
        runs += [play(world, policy, name, numbers, scene=scene, group=f"g{number}") for name in names]
    return runs


Step = Callable[[World, Policy, np.random.Generator], StepData]


def groups(credit, size: int = 8, budget: float = BUDGET) -> Step:
    """Whole attempts in groups, one reward for the team, which an assigner assigns to the calls."""

    def step(world: World, policy: Policy, numbers: np.random.Generator) -> StepData:
        runs = play_groups(world, policy, numbers, int(budget) // size, size)
        credited = [
            credit(run.played().transitions, [Reward(rollout_id=run.name, attempt_id=run.name, value=run.earned)])
            for run in runs
        ]
        return StepData.of(runs, advantages_of(runs, credited, transition_advantages))

    return step


def forks(
    where: Where = "agents",
    *,
    groups: int = 6,
    size: int = 2,
    alternatives: int = 3,
    coupled: bool = True,
    average: bool = True,
    group: bool = True,
) -> Step:
    """Attempts in groups, and alternatives to some of their calls, until the budget is spent."""
    spread: dict[str, float] = {}  # of the step before, for disagreement

    def step(world: World, policy: Policy, numbers: np.random.Generator) -> StepData:
        nonlocal spread
        spread = {} if not policy.logits else spread
        runs = play_groups(world, policy, numbers, groups, size)
        by_name = {run.name: run for run in runs}
        found = candidates([run.played().transitions for run in runs], lambda _: False)
        draw = random.Random(int(numbers.integers(2**31)))
        # How many calls the budget is enough for: a fork is half an attempt and a bit, in the mean.
        count = round((BUDGET - len(runs)) / (0.55 * alternatives)) if where == "entropy" else len(found)
        for point in choose(found, count, where, draw, spread=spread):
            if where != "entropy" and sum(run.cost for run in runs) >= BUDGET - 1e-9:
                break
            record = by_name[point.record]
            its = [fork_of(world, policy, record, point.call, n, numbers, coupled=coupled) for n in range(alternatives)]
            runs += [replace(run, fork=replace(run.fork, weight=point.weight)) for run in its]
        played = [run.played() for run in runs]
        if where == "disagreement":
            spread = Cells.of(played).spread
        credited = counterfactual(played, average=average, group=group)
        return StepData.of(runs, advantages_of(runs, credited, leave_one_out))

    return step


def vine(draws: int = 1) -> Step:
    """VinePPO: the value of every state of an attempt from fresh continuations, of which nothing is learned."""

    def step(world: World, policy: Policy, numbers: np.random.Generator) -> StepData:
        runs: list[Run] = []
        advantages: list[list[float]] = []
        while sum(run.cost for run in runs) < BUDGET - 1e-9:
            record = play(world, policy, f"r{len(runs)}", numbers)
            values = []
            its = []
            for call in range(len(record.calls)):
                tails = [fork_of(world, policy, record, call, n, numbers, coupled=False) for n in range(draws)]
                values.append(float(np.mean([tail.earned for tail in tails])))
                its += tails
            values.append(record.earned)
            runs += [record, *its]
            advantages += [[after - before for before, after in itertools.pairwise(values)]]
            advantages += [[math.nan] * len(run.calls) for run in its]
        return StepData.of(runs, advantages)

    return step


def fork_of(
    world: World,
    policy: Policy,
    record: Run,
    call: int,
    number: int,
    numbers: np.random.Generator,
    *,
    coupled: bool = True,
) -> Run:
    """Draw one call of a record again, and what comes after it."""
    name = f"{record.name}.{call}.{number}"
    return play(world, policy, name, numbers, record=record, call=call, coupled=coupled, group=record.group)


def advantages_of(runs: Sequence[Run], credited: Sequence[Sequence[float]], compare) -> list[list[float]]:
    """Compare calls as every algorithm does; NaN where there is nothing to compare."""
    episodes = [
        Episode(run.group, tuple(run.played().transitions), levels_of(values), (), None, judged=True)
        for run, values in zip(runs, credited, strict=True)
    ]
    every = [call for episode in episodes for call in episode.calls()]
    chosen = [call for call in every if not math.isnan(call.credit)]
    calls = Calls(tuple(chosen), (), Account(), {}, (), judged=True)
    # In the units of the reward: by its deviation, a free rider's noise looks like work.
    made = iter(compare_calls(calls, compare, normalise=False, eps=EPSILON)[FINAL].tolist()) if chosen else iter(())
    return [[math.nan if math.isnan(call.credit) else next(made) for call in episode.calls()] for episode in episodes]


@dataclass(frozen=True)
class Update:
    """One update of the first policy, means over seeds.

    Attributes:
        cosine: of the whole update with the exact gradient.
        rider: mean size of the advantages of those who contribute nothing, over that of the others'.
        drawn: calls that an engine would sample for it.
    """

    cosine: float
    rider: float
    drawn: float


def update(world: World, step: Step, seeds: Sequence[int], exact: dict[Seen, float]) -> Update:
    """Measure one update of a method in one world, whose exact gradient is given."""
    found = [step(world, Policy(world), np.random.default_rng(seed)) for seed in seeds]
    return Update(
        float(np.mean([cosine(direction(Policy(world), learned), exact) for learned in found])),
        float(np.mean([_justice(world, learned)[1] for learned in found])),
        float(np.mean([learned.drawn for learned in found])),
    )


def gradient(world: World, attempts: int = 3000) -> dict[Seen, float]:
    """Return the gradient at the first policy: of each call what it was worth exactly, over many attempts."""
    policy, numbers = Policy(world), np.random.default_rng(10**6)
    runs = [play(world, policy, "", numbers) for _ in range(attempts)]
    calls = [call for run in runs for call in run.calls]
    return direction(policy, StepData(calls, np.array([call.truth for call in calls])))


def direction(policy: Policy, learned: StepData) -> dict[Seen, float]:
    """Return the change of each logit: the sum of advantage times slope of the log-probability."""
    change: dict[Seen, float] = {}
    for call, advantage in zip(learned.calls, learned.advantages, strict=True):
        change[call.seen] = change.get(call.seen, 0.0) + float(advantage) * (call.action - policy.good(*call.seen))
    return change


def cosine(one: dict[Seen, float], other: dict[Seen, float]) -> float:
    """Return the cosine of the angle between two updates."""
    left, right = (np.array([its.get(key, 0.0) for key in {**one, **other}]) for its in (one, other))
    return float(left @ right / max(np.linalg.norm(left) * np.linalg.norm(right), 1e-12))


@dataclass(frozen=True)
class Learning:
    """What a method needed to reach the goal at its best rate; infinity where it did not.

    Attributes:
        rate: the best of those tried, by the median of the continuations.
        continuations: of each seed.
        drawn: calls drawn until then, likewise.
    """

    rate: float
    continuations: list[float]
    drawn: list[float]


def tune(world: World, step: Step, seeds: Sequence[int], rates: Sequence[float]) -> Learning:
    """Learn at several rates, with several seeds each; return the best."""
    tried = []
    for rate in rates:
        costs = [costs_to_goal(world, step, 100 + seed, rate) for seed in seeds]
        tried.append(Learning(rate, *(list(its) for its in zip(*costs, strict=True))))
    return min(tried, key=lambda learning: statistics.median(learning.continuations))


def _justice(world: World, learned: StepData) -> tuple[float, float]:
    idle = np.array([world.agents[call.seen[0]] == 0.0 for call in learned.calls])
    sizes = np.abs(learned.advantages)
    share = float(sizes[idle].mean() if idle.any() else 0.0) / max(float(sizes[~idle].mean()), 1e-12)
    return rank_correlation(learned.advantages, np.array([call.truth for call in learned.calls])), share


def costs_to_goal(world: World, step: Step, seed: int, rate: float) -> tuple[float, float]:
    """Continuations and drawn calls until the goal."""
    policy, numbers, cost, drawn = Policy(world), np.random.default_rng(seed), 0.0, 0
    while cost < LONGEST * BUDGET:
        learned = step(world, policy, numbers)
        cost, drawn = cost + learned.continuations, drawn + learned.drawn
        size = math.sqrt(float(np.mean(learned.advantages**2))) or 1.0  # steps of one size, whatever the units
        for seen, change in direction(policy, learned).items():
            policy.logits[seen] = policy.logits.get(seen, 0.0) + rate * change / size / len(learned.calls)
        if world.reached(policy) >= GOAL:
            return cost, float(drawn)
    return math.inf, math.inf
