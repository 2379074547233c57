"""Successive halving: all methods get a small share of the budget, the better half a larger one, the best one the rest.

Pure: spending tokens and measuring are passed as functions. Karnin, Koren and Somekh, "Almost Optimal Exploration in
Multi-Armed Bandits" (2013), with one additional rung, in which the winner alone spends the rest, or another method that
continues from the winner's weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from lightning_trainer.intervals import Declared, Estimate, estimate_difference

Rewards: TypeAlias = Mapping[int, float]  # mean reward of each held-out task, by its index
States: TypeAlias = Mapping[tuple[str, int], Rewards]  # rewards of each measured state, by method and rung


@dataclass(frozen=True, slots=True, kw_only=True)
class Spending:
    """The state of a method at the end of a rung.

    Attributes:
        tokens: spent so far, in all rungs.
        changed: whether there is something to measure: weights or prompts that differ from the base's.
        ended: why more tokens would change nothing; None if it can continue.
    """

    tokens: int
    changed: bool
    ended: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """The measurement of a method after a rung.

    Attributes:
        rung: from 1.
        tokens: spent so far.
        difference: of its reward to the base's, on the tasks for choosing.
        rewards: by task.
    """

    rung: int
    tokens: int
    difference: Estimate
    rewards: Rewards = field(repr=False)

    @property
    def gain(self) -> float:
        """The mean difference; 0 if no task counts on both sides."""
        return self.difference.mean or 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodResult:
    """The result of a method.

    Attributes:
        tokens: tokens spent.
        ended: why it got no more tokens.
        rung: the last one that it took part in.
        stages: all that were measured, in order.
    """

    tokens: int = 0
    ended: str = ""
    rung: int = 0
    stages: tuple[Stage, ...] = field(default=(), repr=False)

    @property
    def best(self) -> Stage | None:
        """The stage with the highest gain, the first of several; None if the method changed nothing."""
        return max(self.stages, key=lambda stage: stage.gain, default=None)

    @property
    def gain(self) -> float:
        """The gain of the best stage; 0 if there is none."""
        return 0.0 if self.best is None else self.best.gain


def rung_count(methods: int) -> int:
    """Return the number of rungs until one method remains, including the one in which it spends the rest."""
    return 1 if methods == 1 else math.ceil(math.log2(methods)) + 1


def share_of(budget: int, spent: int, rungs_left: int, methods: int) -> int:
    """Return the tokens of one method in the next rung: the rest of the budget divided by rungs, then by methods."""
    return max(0, budget - spent) // rungs_left // methods


def survivors(results: Mapping[str, MethodResult], declared: Declared = None) -> list[str]:
    """Return the better half of the methods, best first, without those significantly worse than the best.

    A method that has ended without a gain is not one of them, and takes no place of a method that can continue.
    """
    able = [name for name in results if not results[name].ended or results[name].gain > 0]
    ranked = sorted(able, key=lambda name: -results[name].gain)
    best = results[ranked[0]].best if ranked else None
    return [
        name
        for name in ranked[: math.ceil(len(ranked) / 2)]
        if name == ranked[0] or best is None or not _is_worse(results[name].best, best, declared)
    ]


def _is_worse(stage: Stage | None, best: Stage, declared: Declared) -> bool:
    if stage is None or not stage.rewards:
        return False
    both = [task for task in best.rewards if task in stage.rewards]
    found = estimate_difference([best.rewards[t] for t in both], [stage.rewards[t] for t in both], declared)
    return found.low is not None and found.low > 0


def halve(
    methods: Sequence[str],
    budget: int,
    spend: Callable[[str, int, int], Spending],
    measure: Callable[[str, int], tuple[Rewards, States]],
    *,
    followers: Mapping[str, str] | None = None,
    declared: Declared = None,
) -> dict[str, MethodResult]:
    """Spend a budget on methods.

    Args:
        methods: their names, at least one.
        budget: tokens of all methods together.
        spend: gets a method, a rung (from 1) and the tokens that the method may have spent by then, and spends them.
        measure: gets a method and a rung, and runs the tasks for choosing with the method's result so far. It returns
            the rewards of the unchanged agent, and of all states measured so far. A failure counts as the same reward
            in all of them, which may be less than in an earlier call.
        followers: by winner: the method that continues from its weights in the last rung of several, in its place.
        declared: range of the rewards.

    Returns:
        The result of each method, in the order of `methods`, and of one that continued.
    """
    results = {name: MethodResult() for name in methods}
    spent: dict[tuple[str, int], int] = {}  # tokens of each measured state
    alive, rungs = list(methods), rung_count(len(methods))
    for rung in range(1, rungs + 1):
        if 1 < rung == rungs and alive and results[alive[0]].gain > 0:
            alive = _follow(results, alive[0], followers or {})
        active = [name for name in alive if not results[name].ended]
        if not active:
            continue
        share = share_of(budget, sum(each.tokens for each in results.values()), rungs - rung + 1, len(active))
        for name in active:
            spending = spend(name, rung, results[name].tokens + share)
            results[name] = replace(results[name], tokens=spending.tokens, ended=spending.ended or "", rung=rung)
            if spending.changed:
                spent[name, rung] = spending.tokens
                base, states = measure(name, rung)
                for other, result in results.items():  # all of them: how failures count may have changed
                    its = [state for state in spent if state[0] == other]
                    stages = [_stage(state[1], spent[state], states[state], base, declared) for state in its]
                    results[other] = replace(result, stages=tuple(stages))
        if rung < rungs:
            kept = survivors({name: results[name] for name in alive}, declared)
            dropped = [name for name in alive if name not in kept and not results[name].ended]
            for name in dropped:
                results[name] = _end(results[name], f"another method did better in rung {rung}")
            alive = kept
    return results


def _follow(results: dict[str, MethodResult], winner: str, followers: Mapping[str, str]) -> list[str]:
    """Return the method of the last rung: the winner, or the one that continues from its weights."""
    follower = followers.get(winner)
    if follower is None:
        return [winner]
    results[winner] = _end(results[winner], f"{follower} continues from its weights")
    results[follower] = MethodResult()
    return [follower]


def _stage(rung: int, tokens: int, rewards: Rewards, base: Rewards, declared: Declared) -> Stage:
    both = [task for task in rewards if task in base]
    found = estimate_difference([rewards[t] for t in both], [base[t] for t in both], declared)
    return Stage(rung=rung, tokens=tokens, difference=found, rewards=rewards)


def _end(result: MethodResult, why: str) -> MethodResult:
    return replace(result, ended=why)
