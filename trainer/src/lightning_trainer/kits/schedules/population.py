"""Populations of past weights for fictitious self-play: which weights are kept, and which opponent a group meets.

An agent that learns against the newest weights of its opponent alone may forget how to beat earlier ones, and the two
go round in cycles. Against weights sampled from the whole past it learns to beat their mixture (fictitious self-play,
Heinrich et al. 2015; neural fictitious self-play, arXiv 1603.01121). So a population is a uniform sample of all
frozen weights so far (reservoir sampling). The last K alone delay the cycle and do not end it.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

NEWEST: Final = "newest"


@dataclass(frozen=True, slots=True)
class FrozenVersion:
    """Weights of a policy that are kept.

    Attributes:
        step: steps taken before they were frozen.
        version: number of the weights.
        copy: name of the adapter that has them.
    """

    step: int
    version: int
    copy: str


@dataclass(frozen=True, slots=True)
class Opponent:
    """What a group of rollouts meets.

    Attributes:
        agent: the agent that is the opponent.
        frozen: its weights; None: the newest, which learn from the group as usual.
    """

    agent: str
    frozen: FrozenVersion | None = None

    @property
    def name(self) -> str:
        """The agent and the number of its weights."""
        return f"{self.agent}@{NEWEST if self.frozen is None else self.frozen.version}"


class Population:
    """A uniform sample of the frozen weights of one policy.

    Args:
        policy: whose.
        size: most that are kept.
        seed: which of them stay follows from it.
        kept: `to_json` of the run that goes on.
    """

    def __init__(self, policy: str, size: int, seed: int, kept: Mapping[str, Any]) -> None:
        self.policy, self._size, self._seed = policy, size, seed
        self.frozen = int(kept.get("frozen", 0))  # all that there were
        self.last: int | None = kept.get("last")  # number of the newest of them
        self.members = [
            FrozenVersion(int(step), int(version), copy)
            for (step, version), copy in zip(kept.get("versions", ()), self.copies, strict=False)
        ]

    @property
    def copies(self) -> tuple[str, ...]:
        """Names of the adapters that its members have."""
        return tuple(f"{self.policy}-past-{place}" for place in range(self._size))

    def to_json(self) -> dict[str, Any]:
        """Return what a checkpoint holds of it."""
        versions = [[each.step, each.version] for each in self.members]
        return {"frozen": self.frozen, "last": self.last, "versions": versions}

    def add(self, step: int, version: int) -> FrozenVersion | None:
        """Take newer weights in, in the place of others if there is no room (algorithm R, Vitter 1985).

        Returns:
            None where they are not among those that stay.
        """
        self.frozen, self.last = self.frozen + 1, version
        place = len(self.members)
        if place == self._size:
            place = random.Random(f"{self._seed}/{self.policy}/{self.frozen}").randrange(self.frozen)
            if place >= self._size:
                return None
        self.members[place : place + 1] = [FrozenVersion(step, version, self.copies[place])]
        return self.members[place]

    def past(self, version: int) -> list[FrozenVersion]:
        """Return the members that are older than these weights."""
        return [each for each in self.members if each.version != version]


def choose_opponent(past: Mapping[str, Sequence[FrozenVersion]], name: str) -> Opponent | None:
    """Choose who is the opponent in a group, and its weights: all agents, then all weights are equally likely.

    Args:
        past: by agent that may be the opponent, its frozen weights.
        name: the same for the same name.

    Returns:
        None where no agent may be.
    """
    if not past:
        return None
    numbers = random.Random(name)
    agent = numbers.choice(sorted(past))
    return Opponent(agent, numbers.choice([None, *past[agent]]))
