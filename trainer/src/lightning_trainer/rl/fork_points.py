"""Chooses which calls of a step's attempts are sampled again, within a budget, where it is expected to tell most."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeAlias

from lightning_spans.schema.transitions import Transition

Where: TypeAlias = Literal["agents", "evenly", "entropy", "disagreement"]
# relative to the mean: the least weight of a call, so that agents without differences are sampled again sometimes
FLOOR: Final = 0.1


@dataclass(frozen=True, slots=True)
class Candidate:
    """A call that can be sampled again.

    Attributes:
        record: the attempt that made it.
        call: its number in the attempt: `Transition.turn`.
        agent: the calling agent.
        surprise: minus the log-probability of the answer, in nats: on average, the entropy of the answer.
        weight: of its alternatives' outcomes in an update, if candidates are not equally likely to be chosen.
    """

    record: str
    call: int
    agent: str
    surprise: float
    weight: float = 1.0


def candidates(attempts: Sequence[Sequence[Transition]], untrainable: Callable[[Transition], bool]) -> list[Candidate]:
    """Return the calls of some attempts that can be sampled again and learned from.

    Args:
        attempts: all transitions of each.
        untrainable: says whether a transition cannot be learned from.
    """
    return [
        Candidate(call.attempt_id, call.turn, call.agent or "", -sum(call.tokens.logprobs) if call.tokens else 0.0)
        for transitions in attempts
        for call in sorted(transitions, key=lambda t: (t.turn, t.choice))
        if call.choice == 0 and not untrainable(call)
    ]


def choose(
    found: Sequence[Candidate],
    count: int,
    where: Where,
    numbers: random.Random,
    *,
    spread: Mapping[str, float] | None = None,
) -> list[Candidate]:
    """Choose the calls that are drawn again, none twice, those first that come first. The same numbers choose the same.

    Args:
        found: of a step.
        count: how many; fewer where there are not so many.
        where: ``evenly``: each call is as likely as another. ``agents``: each agent is, whoever speaks more often, and
            so is each of its calls. ``entropy``: in the proportion of what its answer had of surprise; since the answer
            decides, what comes of it has a `Candidate.weight`. ``disagreement``: in that of the agent's `spread`.
        numbers: the draw.
        spread: by agent, the deviation of what came of the alternatives of its calls before; who is not in it is as
            likely as the mean.
    """
    if where == "entropy":
        return _by_surprise(found, count, numbers)
    weights = _weights(found, where, spread or {})
    # Without replacement: the positions of exponential waiting times (Efraimidis and Spirakis, 2006).
    waits = [-math.log(1.0 - numbers.random()) / weight for weight in weights]
    order = sorted(range(len(found)), key=lambda n: (waits[n], n))
    return [found[n] for n in order[:count]]


def _by_surprise(found: Sequence[Candidate], count: int, numbers: random.Random) -> list[Candidate]:
    """Choose by systematic sampling in a random order: every call has exactly its probability (Madow, 1949)."""
    chances = inclusion_chances([candidate.surprise for candidate in found], count)
    order = numbers.sample(range(len(found)), len(found))
    chosen, total, next_at = [], 0.0, numbers.random()
    for n in order:
        total += chances[n]
        if total > next_at:
            chosen.append(replace(found[n], weight=min(count, len(found)) / len(found) / chances[n]))
            next_at += 1.0
    return chosen


def inclusion_chances(surprises: Sequence[float], count: int) -> list[float]:
    """Return how likely each call is to be among `count`: in proportion to its surprise, and at most 1.

    Divided by its probability, the outcome of a call counts the same on average as if all calls were sampled again
    (Horvitz and Thompson, 1952).
    """
    weights = _raise_to_floor(surprises)
    sure: set[int] = set()
    while len(sure) < min(count, len(weights)):
        rest = [n for n in range(len(weights)) if n not in sure]
        scale = (count - len(sure)) / sum(weights[n] for n in rest)
        more = {n for n in rest if scale * weights[n] >= 1.0}
        if not more:
            return [1.0 if n in sure else scale * weight for n, weight in enumerate(weights)]
        sure |= more
    return [1.0] * len(weights)


def _weights(found: Sequence[Candidate], where: Where, spread: Mapping[str, float]) -> list[float]:
    match where:
        case "agents":
            calls = Counter(candidate.agent for candidate in found)
            return [1.0 / calls[candidate.agent] for candidate in found]
        case "disagreement":
            known = [value for value in spread.values() if value > 0.0]
            usual = sum(known) / len(known) if known else 1.0
            return _raise_to_floor([spread.get(candidate.agent, usual) for candidate in found])
    return [1.0] * len(found)


def _raise_to_floor(weights: Sequence[float]) -> list[float]:
    mean = sum(weights) / max(len(weights), 1)
    return [max(weight, FLOOR * mean) for weight in weights] if mean > 0.0 else [1.0] * len(weights)
