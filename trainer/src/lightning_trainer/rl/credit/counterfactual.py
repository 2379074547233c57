"""Counterfactual credit: what would have come of an attempt, had one of its calls gone otherwise.

An attempt is frozen up to one call, the call is drawn again, several times, and the program goes on from each of these
alternatives (C3, arXiv 2603.06859). All of them saw the same, so whatever differs between their rewards came of what
the call said, of what was drawn after it, and of the noise of the reward. Coupling takes the second away as far as it
can: after the fork a request that was made in the record too gets the recorded answer, which is a draw of the same
policy for the same request. So the distribution of each alternative's reward is what it was, and only their difference
has less noise in it.

Each call is compared with the alternatives of the same call alone, `lightning_trainer.rl.advantages.leave_one_out`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lightning_trainer.rl.credit.played import Played
from lightning_trainer.rl.credit.values import Credited


def counterfactual(attempts: Sequence[Played], *, average: bool = True) -> list[Credited]:
    """Credit the calls of which there are alternatives, each with what came of it.

    Args:
        attempts: of a step; a fork whose record is not among them counts for nothing.
        average: give equal answers to one call the mean of what came of them. The update is the same, but for its
            size, since they are the same tokens; what a call is said to be worth has less noise in it.

    Returns:
        For each attempt (M,) what the attempt earned, to be compared with the other alternatives of the call: the place
        is the record and the call. NaN for a call without an alternative, and for one answered from a record.
    """
    cells = Cells.of(attempts)
    found = [[math.nan] * len(attempt.transitions) for attempt in attempts]
    places = [[""] * len(attempt.transitions) for attempt in attempts]
    for place, members in cells.members.items():
        its = _averaged(cells.values[place], cells.actions[place]) if average else cells.values[place]
        for (n, turn), value in zip(members, its, strict=True):
            for m, transition in enumerate(attempts[n].transitions):
                if transition.turn == turn:
                    found[n][m], places[n][m] = value, place
    return [Credited(its, places=where) for its, where in zip(found, places, strict=True)]


@dataclass(frozen=True, slots=True)
class Cells:
    """Calls with their alternatives, by place: the record and the number of the call. The record comes first.

    Attributes:
        members: the attempts that are compared, by their number in what was given, and the turn of the call in each.
        values: what came of each.
        actions: what each answered; equal answers are equal.
        agents: who called.
    """

    members: Mapping[str, Sequence[tuple[int, int]]]
    values: Mapping[str, Sequence[float]]
    actions: Mapping[str, Sequence[Hashable]]
    agents: Mapping[str, str | None]

    @classmethod
    def of(cls, attempts: Sequence[Played]) -> Cells:
        """Put every fork beside its record."""
        cells = _cells(attempts)
        return cls(
            cells,
            {place: [attempts[n].earned for n, _ in its] for place, its in cells.items()},
            {place: [_said(attempts[n], turn) for n, turn in its] for place, its in cells.items()},
            {place: _agent(attempts[its[0][0]], its[0][1]) for place, its in cells.items()},
        )

    @property
    def spread(self) -> dict[str, float]:
        """Return, by agent, the deviation between what came of the alternatives of one call, less what is noise.

        What came of equal answers to one call differs by noise alone: the reward's, and what was drawn after them. Its
        variance, pooled over all places, is taken off that of all alternatives, pooled over the agent's. Where nothing
        was answered twice nobody can know, and nothing is taken off.
        """
        alike = [_alike(self.actions[place], self.values[place]) for place in self.members]
        noise, degrees = _pooled([same for its in alike for same in its.values()])
        found = {}
        for agent in {*self.agents.values()} - {None}:
            own, its = _pooled([self.values[place] for place in self.members if self.agents[place] == agent])
            left = own / its - noise / degrees if degrees else own / its
            found[str(agent)] = math.sqrt(max(0.0, left))
        return found


def _cells(attempts: Sequence[Played]) -> dict[str, list[tuple[int, int]]]:
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


def _agent(attempt: Played, turn: int) -> str | None:
    return next((t.agent for t in attempt.transitions if t.turn == turn), None)


def _said(attempt: Played, turn: int) -> Hashable:
    """Return what a call answered, all its choices: the tokens, or the text where there are none."""
    calls = sorted((t for t in attempt.transitions if t.turn == turn), key=lambda t: t.choice)
    return tuple(t.tokens.response if t.tokens is not None else repr(dict(t.message)) for t in calls)


def _averaged(values: Sequence[float], actions: Sequence[Hashable]) -> list[float]:
    alike = _alike(actions, values)
    return [float(np.mean(alike[action])) for action in actions]


def _alike(actions: Sequence[Hashable], values: Sequence[float]) -> dict[Hashable, list[float]]:
    """Return what came of each answer."""
    alike: defaultdict[Hashable, list[float]] = defaultdict(list)
    for action, value in zip(actions, values, strict=True):
        alike[action].append(value)
    return alike


def _pooled(samples: Sequence[Sequence[float]]) -> tuple[float, int]:
    """Return the squared distances from the means of some samples, added up, and their degrees of freedom."""
    squares = sum(float(np.sum((np.asarray(its) - np.mean(its)) ** 2)) for its in samples)
    return squares, sum(len(its) - 1 for its in samples)
