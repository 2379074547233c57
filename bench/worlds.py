"""Small worlds of several agents that can be brought back to any call, in which every call's worth is known exactly.

What a world meets in an attempt is its scene; what its agents do are actions, one after the other, each yes or no. All
that happens follows from both, so an attempt is forked by keeping its first actions.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from team import SHARES, Policy

Seen = tuple[str, Hashable]  # the agent whose turn it is, and what it is shown: the request


class World(Protocol):
    """Two of them: `Turns` and `Expedition`."""

    @property
    def agents(self) -> Mapping[str, float]:
        """Who is in it; those with 0 contribute nothing whatever they do."""
        ...

    @property
    def noise(self) -> float:
        """Deviation of what is added to the reward of an attempt."""
        ...

    def scene(self, numbers: np.random.Generator) -> Any:
        """Draw what an attempt meets."""
        ...

    def seen(self, scene: Any, actions: Sequence[bool]) -> Seen | None:
        """Say whose turn it is after these actions, and what it sees; None where the attempt has ended."""
        ...

    def gain(self, scene: Any, actions: Sequence[bool]) -> float:
        """Return what the last of these actions added to the reward."""
        ...

    def truth(self, policy: Policy, scene: Any, actions: Sequence[bool]) -> list[float]:
        """Return what each action was worth: what was to be expected after it, less what was before it."""
        ...

    def reached(self, policy: Policy) -> float:
        """Return the share of the best policy's reward that this policy earns, exactly."""
        ...


@dataclass(frozen=True)
class Turns:
    """The team of `team.Team`: agents take turns, and a good action adds the agent's share at once.

    Attributes:
        agents: by name, the share of each.
        states: number of states that a call may meet.
        rounds: fewest and most turns of each agent.
        noise: deviation of what is added to the reward.
    """

    agents: Mapping[str, float] = field(default_factory=lambda: SHARES)
    states: int = 3
    rounds: tuple[int, int] = (2, 4)
    noise: float = 0.1

    def scene(self, numbers: np.random.Generator) -> tuple[Seen, ...]:
        rounds = int(numbers.integers(self.rounds[0], self.rounds[1] + 1))
        order = [agent for _ in range(rounds) for agent in numbers.permutation([*self.agents]).tolist()]
        return tuple((agent, int(numbers.integers(self.states))) for agent in order)

    def seen(self, scene: tuple[Seen, ...], actions: Sequence[bool]) -> Seen | None:
        return scene[len(actions)] if len(actions) < len(scene) else None

    def gain(self, scene: tuple[Seen, ...], actions: Sequence[bool]) -> float:
        return self._share(scene, len(actions) - 1) * actions[-1]

    def truth(self, policy: Policy, scene: tuple[Seen, ...], actions: Sequence[bool]) -> list[float]:
        return [self._share(scene, n) * (action - policy.good(*scene[n])) for n, action in enumerate(actions)]

    def reached(self, policy: Policy) -> float:
        did = sum(share * policy.good(agent, s) for agent, share in self.agents.items() for s in range(self.states))
        return did / (self.states * sum(self.agents.values()))

    def _share(self, scene: tuple[Seen, ...], n: int) -> float:
        return self.agents[scene[n][0]] / sum(self.agents[agent] for agent, _ in scene)


@dataclass(frozen=True)
class Expedition:
    """An early call decides what later ones can do, and the policy chooses when to stop.

    A scout speaks once, at the beginning: by the good answer to what it meets, the way is rich, else it is poor. Then
    come rounds of a worker, whose good step gains much on a rich way and little on a poor one, a rider whose words lead
    nowhere, and a captain, who goes on or stops. Every round costs. On a rich way it pays to go on, on a poor one to
    stop at once. What worker and captain see has the way in it; what the rider sees has not.

    Attributes:
        agents: by name; the rider's 0 says that it contributes nothing.
        states: number of states that scout and worker may meet.
        rounds: most rounds.
        rich: what a good step gains on a rich way.
        poor: what it gains on a poor one.
        cost: of each round after the first.
        noise: deviation of what is added to the reward.
    """

    agents: Mapping[str, float] = field(
        default_factory=lambda: {"scout": 1.0, "worker": 1.0, "rider": 0.0, "captain": 1.0}
    )
    states: int = 3
    rounds: int = 4
    rich: float = 0.25
    poor: float = 0.05
    cost: float = 0.1
    noise: float = 0.1

    def scene(self, numbers: np.random.Generator) -> tuple[int, ...]:
        """Draw the state that the scout meets, and then those of the worker's rounds."""
        return tuple(int(state) for state in numbers.integers(self.states, size=1 + self.rounds))

    def seen(self, scene: tuple[int, ...], actions: Sequence[bool]) -> Seen | None:
        if not actions:
            return "scout", (scene[0],)
        number, step = divmod(len(actions) - 1, 3)  # the round, and who speaks in it
        if step == 0 and (number == self.rounds or (number and not actions[-1])):
            return None
        whose = (
            ("worker", (actions[0], scene[1 + number])),
            ("rider", (number,)),
            ("captain", (actions[0],)),
        )
        return whose[step]

    def gain(self, scene: tuple[int, ...], actions: Sequence[bool]) -> float:
        if len(actions) == 1:
            return 0.0
        number, step = divmod(len(actions) - 2, 3)
        if step == 0:
            return (self.rich if actions[0] else self.poor) * actions[-1]
        goes_on = step == 2 and actions[-1] and number + 1 < self.rounds
        return -self.cost if goes_on else 0.0

    def truth(self, policy: Policy, scene: tuple[int, ...], actions: Sequence[bool]) -> list[float]:
        later = functools.cache(lambda way, number: self._to_come(policy, scene, way, number))
        worth = []
        for n, action in enumerate(actions):
            chance = policy.good(*self.seen(scene, actions[:n]))
            number, step = divmod(n - 1, 3)
            if n == 0:
                differ = later(True, 0) - later(False, 0)
            elif step == 0:
                differ = self.rich if actions[0] else self.poor
            elif step == 2 and number + 1 < self.rounds:
                differ = later(actions[0], number + 1) - self.cost
            else:
                differ = 0.0
            worth.append(differ * (action - chance))
        return worth

    def _to_come(self, policy: Policy, scene: tuple[int, ...], way: bool, number: int) -> float:
        """What is to be expected from a round on, on this way."""
        total = 0.0
        for n in reversed(range(number, self.rounds)):
            step = (self.rich if way else self.poor) * policy.good("worker", (way, scene[1 + n]))
            goes_on = policy.good("captain", (way,)) if n + 1 < self.rounds else 0.0
            total = step + goes_on * (total - self.cost)
        return total

    def reached(self, policy: Policy) -> float:
        best = max(self.rich + (self.rounds - 1) * (self.rich - self.cost), self.rich)
        states = range(self.states)
        worth = 0.0
        for first in states:
            rich = policy.good("scout", (first,))
            worth += rich * self._mean(policy, True) + (1.0 - rich) * self._mean(policy, False)
        return worth / self.states / best

    def _mean(self, policy: Policy, way: bool) -> float:
        """What is to be expected of a way, whatever states the worker meets."""
        total = 0.0
        for n in reversed(range(self.rounds)):
            good = np.mean([policy.good("worker", (way, state)) for state in range(self.states)])
            goes_on = policy.good("captain", (way,)) if n + 1 < self.rounds else 0.0
            total = (self.rich if way else self.poor) * float(good) + goes_on * (total - self.cost)
        return total
