"""Credit by alternatives of one call: exact in a small decision process, just in a simulated team."""

from __future__ import annotations

import functools
import itertools
import math
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import forked
import team as simulated
import worlds

from lightning_spans.errors import ConfigError
from lightning_spans.schema.replays import FORKED, REPLAYED
from lightning_spans.schema.transitions import Tokens, Transition
from lightning_trainer.rl.credit.assigners import credit_by_name
from lightning_trainer.rl.credit.counterfactual import Cells, counterfactual
from lightning_trainer.rl.credit.played import AcrossAttempts, Fork, PlayedAttempt
from lightning_trainer.rl.fork_points import Candidate, candidates, choose, inclusion_chances

FIRST = 0.3  # how likely the first call is 1
SECOND = (0.6, 0.2)  # the second, after a 0 and after a 1: it sees the first
THIRD = 0.5  # the third, which sees neither
Actions = tuple[int, int, int]
Reward = Callable[[Actions], float]
TABLE = [[[1.0, 4.0], [0.0, 2.0]], [[5.0, -1.0], [3.0, 3.5]]]


def entangled(actions: Actions) -> float:
    """What the third call is worth depends on what the first one said."""
    a, b, c = actions
    return TABLE[a][b][c]


def added(actions: Actions) -> float:
    """Each call has its own part in the reward."""
    a, b, c = actions
    return a + b + 5.0 * c


def chance(p: float, action: int) -> float:
    return p if action else 1.0 - p


def rollouts() -> Iterator[tuple[float, Actions]]:
    """Return every attempt with its probability."""
    for a, b, c in itertools.product((0, 1), repeat=3):
        yield chance(FIRST, a) * chance(SECOND[a], b) * chance(THIRD, c), (a, b, c)


def continuations(record: Actions, *, coupled: bool) -> Iterator[tuple[float, Actions]]:
    """Return every alternative to the first call of a record with what may follow, and its probability."""
    for probability, (a, b, c) in rollouts():
        if not coupled:
            yield probability, (a, b, c)
            continue
        if c != record[2] or (a == record[0] and b != record[1]):
            continue  # the same is asked, so the same is answered
        yield chance(FIRST, a) * (1.0 if a == record[0] else chance(SECOND[a], b)), (a, b, c)


def attempt(name: str, actions: Actions, reward: Reward, fork: Fork | None = None) -> forked.Run:
    calls = tuple(
        forked.Call((agent, n), bool(action), fork is not None and n > 0, 0.5, 0.0)
        for n, (agent, action) in enumerate(zip("abc", actions, strict=True))
    )
    return forked.Run(name, None, calls, reward(actions), fork=fork, group="g")


@functools.cache
def expected(reward: Reward, *, coupled: bool, average: bool = True) -> tuple[dict[int, float], float]:
    """Return, over all that can happen, the mean advantage of each first action, and the variance of the gradient."""
    sums: defaultdict[int, float] = defaultdict(float)
    weight: defaultdict[int, float] = defaultdict(float)
    moments = np.zeros(2)
    for p_record, record in rollouts():
        for (p_one, one), (p_two, two) in itertools.product(continuations(record, coupled=coupled), repeat=2):
            forks = [attempt(name, its, reward, Fork("r", 0)) for name, its in (("f", one), ("g", two))]
            runs = [attempt("r", record, reward), *forks]
            credited = counterfactual([run.played() for run in runs], average=average)
            advantages = forked.advantages_of(runs, credited, forked.leave_one_out)
            assert all(math.isnan(value) for its in advantages for value in its[1:])
            p, gradient = p_record * p_one * p_two, 0.0
            for run, its in zip(runs, advantages, strict=True):
                action = int(run.calls[0].action)
                sums[action] += p * its[0]
                weight[action] += p
                gradient += (action - FIRST) * its[0] / 3
            moments += p * np.array([gradient, gradient**2])
    return {action: sums[action] / weight[action] for action in sums}, moments[1] - moments[0] ** 2


def truth(reward: Reward) -> dict[int, float]:
    value = sum(p * reward(actions) for p, actions in rollouts())
    of = {a: sum(p * reward(its) for p, its in rollouts() if its[0] == a) / chance(FIRST, a) for a in (0, 1)}
    return {a: of[a] - value for a in (0, 1)}


@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize("average", [False, True])
def test_leave_one_out_is_the_advantage_whichever_way_continuations_are_drawn(coupled: bool, average: bool) -> None:
    found, _ = expected(entangled, coupled=coupled, average=average)
    if average:  # equal answers share what came of them, so only their sum is without bias
        gradient = sum(chance(FIRST, a) * (a - FIRST) * found[a] for a in (0, 1))
        assert gradient == pytest.approx(sum(chance(FIRST, a) * (a - FIRST) * truth(entangled)[a] for a in (0, 1)))
    else:
        assert found == pytest.approx(truth(entangled))


def test_coupled_continuations_have_less_noise_where_calls_have_parts_of_their_own() -> None:
    assert expected(added, coupled=True)[1] < 0.1 * expected(added, coupled=False)[1]


def test_an_average_over_equal_answers_leaves_the_update_as_it_is() -> None:
    assert expected(added, coupled=True, average=False)[1] == pytest.approx(expected(added, coupled=True)[1])


def test_coupled_continuations_see_one_tail_alone_which_costs_where_calls_are_entangled() -> None:
    assert expected(entangled, coupled=True)[1] > expected(entangled, coupled=False)[1]


def call(attempt_id: str, turn: int, agent: str = "a", said: int = 0, **sampling: str) -> Transition:
    return Transition(
        rollout_id=attempt_id,
        attempt_id=attempt_id,
        agent=agent,
        turn=turn,
        span_id=f"{attempt_id}-{turn}",
        tokens=Tokens((1,), (said,), (-1.0 - said,)),
        sampling=sampling,
    )


def played(name: str, earned: float, *transitions: Transition, fork: Fork | None = None) -> PlayedAttempt:
    return PlayedAttempt(attempt_id=name, transitions=transitions, earned=earned, fork=fork, group="g")


def test_only_the_call_that_was_drawn_again_has_credit() -> None:
    record = played("r", 1.0, call("r", 0), call("r", 1, "b"), call("r", 2))
    fork = played(
        "f",
        0.0,
        call("f", 0, **{REPLAYED: "x"}),
        call("f", 1, "b", 5, **{FORKED: "y"}),
        call("f", 2),
        fork=Fork("r", 1),
    )
    lost = played("l", 9.0, call("l", 0, **{FORKED: "y"}), fork=Fork("gone", 0))
    mistaken = played("m", 9.0, call("m", 0, "c", **{FORKED: "y"}), fork=Fork("r", 1))
    ended = played("e", 9.0, call("e", 0, **{REPLAYED: "x"}), fork=Fork("r", 1))
    found = counterfactual([record, fork, lost, mistaken, ended])
    assert [[None if math.isnan(value) else value for value in its] for its in found] == [
        [None, 1.0, None],
        [None, 0.0, None],
        [None],
        [None],
        [None],
    ]
    assert found[0].levels[0].places == ["r/0", "r/1", "r/2"]


def test_noise_is_told_from_what_answers_come_to() -> None:
    numbers = np.random.default_rng(0)
    attempts = []
    for n in range(400):
        for agent, turn, worth in (("works", 0, 1.0), ("rides", 1, 0.0)):
            said, fork = int(numbers.integers(2)), Fork(f"r{n}", turn)
            for name in (f"{n}.{turn}.1", f"{n}.{turn}.2"):
                its = call(name, turn, agent, said, **{FORKED: "x"})
                attempts.append(played(name, worth * said + numbers.normal(0.0, 0.5), its, fork=fork))
        calls = (call(f"r{n}", 0, "works"), call(f"r{n}", 1, "rides"))
        attempts.append(played(f"r{n}", numbers.normal(0.0, 0.5), *calls))
    spread = Cells.of(attempts).spread
    assert spread["works"] > 0.25 > spread["rides"]


def test_a_records_other_calls_learn_from_their_group_and_forked_ones_from_their_alternatives() -> None:
    runs = [
        attempt("r", (1, 0, 0), lambda _: 1.0),
        attempt("o", (0, 0, 0), lambda _: 0.25),
        attempt("f", (0, 0, 0), lambda _: 0.5, Fork("r", 0)),
    ]

    def advantages(**options: bool) -> list[list[float]]:
        credited = counterfactual([run.played() for run in runs], **options)
        return forked.advantages_of(runs, credited, forked.leave_one_out)

    none = math.nan
    of_group, of_fork = [-0.75] * 3, [-0.5, none, none]
    for found, expect in (
        (advantages(), [[0.5, 0.75, 0.75], of_group, of_fork]),
        (advantages(group=False), [[0.5, none, none], [none] * 3, of_fork]),
    ):
        assert [*itertools.chain(*found)] == pytest.approx([*itertools.chain(*expect)], nan_ok=True)


CANDIDATES = [
    Candidate(f"r{n}", turn, agent, surprise)
    for n in range(20)
    for turn, (agent, surprise) in enumerate([("often", 1.0)] * 9 + [("once", 4.0)])
]


def drawn(where: str, **options: dict[str, float]) -> float:
    """Return how often the agent that speaks once is among the first calls."""
    found = [choose(CANDIDATES, 20, where, random.Random(n), **options) for n in range(100)]  # type: ignore[arg-type]
    return sum(point.agent == "once" for points in found for point in points) / 2000


def test_a_budget_is_spent_where_it_is_said() -> None:
    assert drawn("evenly") == pytest.approx(0.1, abs=0.03)
    assert drawn("agents") == pytest.approx(0.45, abs=0.07)
    assert drawn("entropy") == pytest.approx(4 / 13, abs=0.06)
    assert drawn("disagreement") == pytest.approx(0.1, abs=0.03)  # nothing is known
    assert drawn("disagreement", spread={"once": 9.0, "often": 1.0}) > 0.35
    assert 0.0 < drawn("disagreement", spread={"once": 0.0, "often": 1.0}) < 0.03


SURPRISES = [5.0, 1.0, 0.0, 2.5, 0.5]


@pytest.mark.parametrize("count", [1, 2, 4, 9])
def test_a_call_is_chosen_as_often_as_its_surprise_says_and_weighs_the_less(count: int) -> None:
    class Draw(random.Random):
        """Everything in order, and one number."""

        def __init__(self, number: float) -> None:
            self.number = number

        def random(self) -> float:
            return self.number

        def sample(self, population: Sequence[int], k: int, **_: object) -> list[int]:  # type: ignore[override]
            return list(population)[:k]

    found = [Candidate("r", n, "a", surprise) for n, surprise in enumerate(SURPRISES)]
    chances = inclusion_chances(SURPRISES, count)
    assert sum(chances) == pytest.approx(min(count, 5))
    draws = 2000
    often = [0.0] * 5
    for n in range(draws):
        for point in choose(found, count, "entropy", Draw((n + 0.5) / draws)):
            often[point.call] += 1 / draws
            assert point.weight == pytest.approx(min(count, 5) / 5 / chances[point.call])
    assert often == pytest.approx(chances, abs=2 / draws)


def by_surprise(reward: Reward, *, weighed: bool) -> np.ndarray:
    """Return the mean update, over all that can happen, of forks of one call chosen by surprise: one for each logit."""
    total = np.zeros(4)
    for p_record, record in rollouts():
        seen = chances_of(record)
        candidates = [Candidate("r", n, "x", -math.log(chance(p, its))) for n, (_, p, its) in enumerate(seen)]
        chosen = inclusion_chances([candidate.surprise for candidate in candidates], 1)
        for n, p_chosen in enumerate(chosen):
            weight = 1 / 3 / p_chosen if weighed else 1.0
            for p_fork, other in rollouts():
                before = math.prod(chance(p, its) for _, p, its in chances_of(other)[:n])
                if other[:n] != record[:n]:
                    continue
                runs = [attempt("r", record, reward), leaf(other, n, reward, weight)]
                credited = counterfactual([run.played() for run in runs], group=False)
                for its, actions in zip(
                    forked.advantages_of(runs, credited, forked.leave_one_out), (record, other), strict=True
                ):
                    logit, p, action = chances_of(actions)[n]
                    total[logit] += p_record * p_chosen * p_fork / before * its[n] * (action - p)
    return total


def leaf(actions: Actions, call: int, reward: Reward, weight: float) -> forked.Run:
    made = attempt("f", actions, reward, Fork("r", call, weight=weight))
    return replace(made, calls=tuple(replace(one, replayed=n < call) for n, one in enumerate(made.calls)))


def chances_of(actions: Actions) -> list[tuple[int, float, int]]:
    """Return of each call its logit, how likely it is 1, and what it was."""
    a, b, c = actions
    return [(0, FIRST, a), (1 + a, SECOND[a], b), (3, THIRD, c)]


def test_forks_chosen_by_surprise_point_where_the_gradient_does() -> None:
    exact = np.zeros(4)
    for p, actions in rollouts():
        for logit, likely, action in chances_of(actions):
            exact[logit] += p * entangled(actions) * (action - likely)

    def cosine(update: np.ndarray) -> float:
        return float(update @ exact / np.linalg.norm(update) / np.linalg.norm(exact))

    assert cosine(by_surprise(entangled, weighed=True)) == pytest.approx(1.0, abs=1e-12)
    assert cosine(by_surprise(entangled, weighed=False)) < 0.995, "the answer decides whether its call is chosen"


def test_no_call_is_chosen_twice_and_the_same_numbers_choose_the_same() -> None:
    once, again = (choose(CANDIDATES, 50, "agents", random.Random(3)) for _ in range(2))
    assert once == again
    assert len(set(once)) == 50
    assert len(choose(CANDIDATES, 10**6, "evenly", random.Random(0))) == len(CANDIDATES)
    assert choose([], 3, "entropy", random.Random(0)) == []


def test_calls_that_can_not_be_learned_from_are_not_drawn_again() -> None:
    transitions = [call("r", 0, said=1), call("r", 1, "b"), call("r", 2)]
    found = candidates([transitions], lambda its: its.agent == "b")
    assert [(point.call, point.surprise) for point in found] == [(0, 2.0), (2, 1.0)]


def test_counterfactual_is_chosen_by_its_name_and_knows_its_options() -> None:
    credit = credit_by_name("counterfactual", average=False)
    assert isinstance(credit, AcrossAttempts)
    with pytest.raises(ConfigError, match=r"has no option 'gamma'\. It has: average"):
        credit_by_name("counterfactual", gamma=0.5)


@pytest.mark.parametrize("world", [worlds.Turns(), worlds.Expedition(states=2, rounds=3)])
def test_worlds_know_what_each_call_is_worth(world: worlds.World) -> None:
    policy = simulated.Policy(world)  # type: ignore[arg-type]
    numbers = np.random.default_rng(0)
    scene = world.scene(numbers)

    def gain(actions: Sequence[bool]) -> float:
        return sum(world.gain(scene, actions[: n + 1]) for n in range(len(actions)))

    def value(actions: list[bool]) -> float:
        seen = world.seen(scene, actions)
        if seen is None:
            return gain(actions)
        p = policy.good(*seen)  # type: ignore[arg-type]
        return p * value([*actions, True]) + (1 - p) * value([*actions, False])

    actions = [True] * 4 if isinstance(world, worlds.Expedition) else []
    while world.seen(scene, actions) is not None:
        actions.append(bool(numbers.random() < 0.5))
    if isinstance(world, worlds.Turns):
        n = len(actions) - 4
        shown = [value([*actions[:k], actions[k]]) - value(actions[:k]) for k in range(n, len(actions))]
        assert world.truth(policy, scene, actions)[n:] == pytest.approx(shown)
        return
    shown = [value(actions[: k + 1]) - value(actions[:k]) for k in range(len(actions))]
    assert world.truth(policy, scene, actions) == pytest.approx(shown)
    means = []
    for states in itertools.product(range(world.states), repeat=1 + world.rounds):
        scene = states
        means.append(value([]))
    best = world.rich + (world.rounds - 1) * (world.rich - world.cost)
    assert world.reached(policy) == pytest.approx(np.mean(means) / best)


Step = Callable[..., forked.StepData]


def justice(world: worlds.World, step: Step, seeds: Sequence[int] = range(6)) -> np.ndarray:
    found = [
        forked._justice(world, step(world, simulated.Policy(world), np.random.default_rng(seed)))  # type: ignore[arg-type]
        for seed in seeds
    ]
    return np.mean(found, axis=0)


@pytest.mark.parametrize("kind", [worlds.Turns, worlds.Expedition])
def test_with_coupled_alternatives_credit_agrees_and_a_rider_gets_nothing(kind: type) -> None:
    world = kind(noise=0.0)
    coupled, rider = justice(world, forked.forks(group=False))
    assert rider == pytest.approx(0.0, abs=1e-9)
    assert coupled > justice(world, forked.forks(group=False, coupled=False))[0] + (
        0.15 if kind is worlds.Turns else 0.0
    )
    assert coupled > justice(world, forked.groups(credit_by_name("identical")))[0] + 0.3


def test_with_noise_an_update_agrees_better_with_the_gradient_where_other_calls_learn_from_their_group() -> None:
    world = worlds.Turns(noise=0.1)
    exact = forked.gradient(world, 300)
    both, alone = (forked.update(world, forked.forks(group=group), range(12), exact) for group in (True, False))
    assert both.cosine > alone.cosine + 0.05
    assert alone.rider < 0.8 < both.rider, "to tell who earned it, alternatives alone are better"
