"""Counterfactual credit: the outcome of an attempt if one of its calls had answered differently.

An attempt is frozen up to one call, the call is sampled again several times, and the program continues from each of
these alternatives (C3, arXiv 2603.06859). All of them saw the same, so differences between their rewards come from what
the call said, from what was sampled after it, and from the noise of the reward. Coupling removes the second as far as
possible: after the fork, a request that was also made in the record gets the recorded answer, which is a sample of the
same policy for the same request. So the distribution of each alternative's reward is unchanged, and only their
difference has less noise.

Such a call is compared only with its own alternatives, `lightning_trainer.rl.advantages.leave_one_out`. The other calls
of the forked attempts are compared as in any group: with the other attempts of their task.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lightning_trainer.rl.credit.played import PlayedAttempt
from lightning_trainer.rl.credit.values import CreditedValues, Level


def counterfactual(
    attempts: Sequence[PlayedAttempt], *, average: bool = True, group: bool = True
) -> list[CreditedValues]:
    """Credit calls that have alternatives with their outcomes, and the others with their attempt's.

    Args:
        attempts: of a step; a fork whose record is not among them is ignored.
        average: give equal answers to one call the mean of their outcomes. The update is the same except for its size,
            because they are the same tokens, and a call's value has less noise.
        group: let an attempt's calls without an alternative learn as in any group, from the attempt's reward.

    Returns:
        For each attempt (M,) its reward, to be compared with the call's other alternatives: the place is the record and
        the call. NaN for a call that is compared with nothing, and for one answered from a record.
    """
    cells = Cells.of(attempts)
    values = [[math.nan] * len(attempt.transitions) for attempt in attempts]
    places = [[""] * len(attempt.transitions) for attempt in attempts]
    weights = [[1.0] * len(attempt.transitions) for attempt in attempts]
    for place, members in cells.members.items():
        its = _average_by_action(cells.values[place], cells.actions[place]) if average else cells.values[place]
        for (n, turn), value in zip(members, its, strict=True):
            for m, transition in enumerate(attempts[n].transitions):
                if transition.turn == turn:
                    values[n][m], places[n][m], weights[n][m] = value, place, cells.weights[place]
    if not group:
        parts = zip(values, places, weights, strict=True)
        return [CreditedValues(its, places=where, weight=weight) for its, where, weight in parts]
    # Calls with an alternative learn only from it. If answers decide which calls have one, that would be a bias.
    both = any(weight != 1.0 for weight in cells.weights.values())
    sizes = Counter(attempt.group for attempt in attempts if attempt.fork is None)
    return [
        _also_in_group(attempt, its, where, weight, compared=sizes[attempt.group] > 1, both=both)
        for attempt, its, where, weight in zip(attempts, values, places, weights, strict=True)
    ]


def _also_in_group(
    attempt: PlayedAttempt,
    values: Sequence[float],
    places: Sequence[str],
    weights: Sequence[float],
    *,
    compared: bool,
    both: bool,
) -> CreditedValues:
    """Add the comparison of attempts: none for forks, whose calls have no others in it, and one for their records.

    Args:
        attempt: a record or a fork.
        values: of its calls with an alternative; NaN for the others.
        places: likewise.
        weights: likewise.
        compared: whether there are attempts to compare a record with.
        both: whether calls with an alternative also learn from their group.
    """
    own = [f"{attempt.attempt_id}/{transition.turn}" for transition in attempt.transitions]
    alone = [math.isnan(value) for value in values]
    learns = compared and attempt.fork is None
    known = [attempt.earned if learns and math.isnan(value) else value for value in values]
    where = [mine if lone else place for mine, lone, place in zip(own, alone, places, strict=True)]
    among = Level(
        values=[attempt.earned] * len(own),
        places=[""] * len(own) if attempt.fork is None else own,
        weight=[float(both or lone) for lone in alone],
    )
    return CreditedValues(known, places=where, weight=weights, more=[among])


@dataclass(frozen=True, slots=True)
class Cells:
    """Calls with their alternatives, by place: the record and the number of the call. The record comes first.

    Attributes:
        members: the compared attempts, by their number in the input, and the turn of the call in each.
        values: the outcome of each.
        actions: the answer of each; equal answers are equal.
        agents: the calling agent.
        weights: of the comparison, if calls are not equally likely to be sampled again.
    """

    members: Mapping[str, Sequence[tuple[int, int]]]
    values: Mapping[str, Sequence[float]]
    actions: Mapping[str, Sequence[Hashable]]
    agents: Mapping[str, str | None]
    weights: Mapping[str, float]

    @classmethod
    def of(cls, attempts: Sequence[PlayedAttempt]) -> Cells:
        """Put every fork next to its record."""
        cells = _cells(attempts)
        return cls(
            cells,
            {place: [attempts[n].earned for n, _ in its] for place, its in cells.items()},
            {place: [_action_of(attempts[n], turn) for n, turn in its] for place, its in cells.items()},
            {place: _agent(attempts[its[0][0]], its[0][1]) for place, its in cells.items()},
            {place: _weight(attempts[its[1][0]]) for place, its in cells.items()},
        )

    @property
    def spread(self) -> dict[str, float]:
        """Return, by agent, the deviation between the outcomes of one call's alternatives, without noise.

        Outcomes of equal answers to one call differ only by noise: the reward's, and what was sampled later. Their
        variance, pooled over all places, is subtracted from that of all alternatives, pooled over the agent's. If
        nothing was answered twice, the noise is unknown and nothing is subtracted.
        """
        alike = [_alike(self.actions[place], self.values[place]) for place in self.members]
        noise, degrees = _pool_squares([same for its in alike for same in its.values()])
        found = {}
        for agent in {*self.agents.values()} - {None}:
            own, its = _pool_squares([self.values[place] for place in self.members if self.agents[place] == agent])
            left = own / its - noise / degrees if degrees else own / its
            found[str(agent)] = math.sqrt(max(0.0, left))
        return found


def _cells(attempts: Sequence[PlayedAttempt]) -> dict[str, list[tuple[int, int]]]:
    """Return, by place, the attempts that are compared there and the turn of the call in each, the record first."""
    number = {attempt.attempt_id: n for n, attempt in enumerate(attempts)}
    cells: dict[str, list[tuple[int, int]]] = {}
    for n, attempt in enumerate(attempts):
        turn, fork = attempt.alternative, attempt.fork
        if fork is None or fork.call is None or turn is None or fork.record not in number:
            continue
        record = attempts[number[fork.record]]
        its = {t.agent for t in record.transitions if t.turn == fork.call}
        if _agent(attempt, turn) in its:
            cells.setdefault(f"{fork.record}/{fork.call}", [(number[fork.record], fork.call)]).append((n, turn))
    return cells


def _weight(attempt: PlayedAttempt) -> float:
    return 1.0 if attempt.fork is None else attempt.fork.weight


def _agent(attempt: PlayedAttempt, turn: int) -> str | None:
    return next((t.agent for t in attempt.transitions if t.turn == turn), None)


def _action_of(attempt: PlayedAttempt, turn: int) -> Hashable:
    """Return a call's answer, all its choices: the tokens, or the text if there are none."""
    calls = sorted((t for t in attempt.transitions if t.turn == turn), key=lambda t: t.choice)
    return tuple(t.tokens.response if t.tokens is not None else repr(dict(t.message)) for t in calls)


def _average_by_action(values: Sequence[float], actions: Sequence[Hashable]) -> list[float]:
    alike = _alike(actions, values)
    return [float(np.mean(alike[action])) for action in actions]


def _alike(actions: Sequence[Hashable], values: Sequence[float]) -> dict[Hashable, list[float]]:
    """Return the outcomes of each answer."""
    alike: defaultdict[Hashable, list[float]] = defaultdict(list)
    for action, value in zip(actions, values, strict=True):
        alike[action].append(value)
    return alike


def _pool_squares(samples: Sequence[Sequence[float]]) -> tuple[float, int]:
    """Return the sum of squared distances from the means of some samples, and their degrees of freedom."""
    squares = sum(float(np.sum((np.asarray(its) - np.mean(its)) ** 2)) for its in samples)
    return squares, sum(len(its) - 1 for its in samples)
