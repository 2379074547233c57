"""Populations of past weights for fictitious self-play: which weights are kept, and which opponent a group meets.

An agent that learns only against the newest weights of its opponent may forget how to beat earlier ones, and the two go
round in cycles. Against weights sampled from the whole past, it learns to beat their mixture (fictitious self-play,
Heinrich et al. 2015; neural fictitious self-play, arXiv 1603.01121). So a population is a uniform sample of all frozen
weights so far (reservoir sampling). The last K alone delay the cycle but do not end it.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

NEWEST: Final = "newest"


@dataclass(frozen=True, slots=True)
class FrozenVersion:
    """Frozen weights of a policy.

    Attributes:
        step: number of steps before they were frozen.
        version: number of the weights.
        copy: name of the adapter that has them.
    """

    step: int
    version: int
    copy: str


@dataclass(frozen=True, slots=True)
class Opponent:
    """The opponent of a group of rollouts.

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
        policy: name of the policy.
        size: maximum number of members.
        seed: determines which members stay.
        kept: `to_json` of the resumed run.
    """

    def __init__(self, policy: str, size: int, seed: int, kept: Mapping[str, Any]) -> None:
        self.policy, self._size, self._seed = policy, size, seed
        self.frozen = int(kept.get("frozen", 0))  # number of versions that were ever frozen
        self.last: int | None = kept.get("last")  # version number of the newest
        self.members = [
            FrozenVersion(int(step), int(version), copy)
            for (step, version), copy in zip(kept.get("versions", ()), self.copies, strict=False)
        ]

    @property
    def copies(self) -> tuple[str, ...]:
        """Names of the members' adapters."""
        return tuple(f"{self.policy}-past-{place}" for place in range(self._size))

    def to_json(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        versions = [[each.step, each.version] for each in self.members]
        return {"frozen": self.frozen, "last": self.last, "versions": versions}

    def add(self, step: int, version: int) -> FrozenVersion | None:
        """Add newer weights, and replace others if there is no room (algorithm R, Vitter 1985).

        Returns:
            The new member; None if it is not kept.
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
    """Choose the opponent of a group and its weights: first all agents, then all weights, are equally likely.

    Args:
        past: frozen weights by agent, of the agents that may be the opponent.
        name: seed; the same name gives the same choice.

    Returns:
        None if there is no such agent.
    """
    if not past:
        return None
    numbers = random.Random(name)
    agent = numbers.choice(sorted(past))
    return Opponent(agent, numbers.choice([None, *past[agent]]))
