"""The order of tasks by the policies' success: tasks that they sometimes solve are sampled more often.

Each policy has a Beta estimate of every task's success. It forgets half of its data each time the task is used again,
because policies change. A task is sampled in proportion to the mean of p(1-p) over the policies, which is half the
probability that two rollouts differ. A floor keeps sampling tasks that seem hopeless or solved.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Mapping
from typing import Final, TypeAlias

FLOOR: Final = 0.03  # least weight of a task; a task that is solved half the time has 0.25
FORGET: Final = 0.5  # weight of a task's earlier rollouts, each time it is used again
PRIOR: Final = 0.5  # successes and failures that each estimate starts with (Jeffreys)

# by policy and by digest of the task: successes and failures so far
Estimates: TypeAlias = dict[str, dict[str, tuple[float, float]]]


def weight(estimates: Estimates, task: str) -> float:
    """Return the weight with which a task is sampled. A task that no policy has met has the largest weight."""
    each = []
    for known in estimates.values():
        successes, failures = known.get(task, (0.0, 0.0))
        p = (successes + PRIOR) / (successes + failures + 2 * PRIOR)
        each.append(p * (1 - p))
    return max(FLOOR, sum(each) / len(each)) if each else 0.25


def learn(estimates: Estimates, rewards: Mapping[str, Mapping[str, float]], rollouts: int) -> Estimates:
    """Return the estimates after a step.

    Args:
        estimates: those before.
        rewards: by policy and task, the mean reward of its rollouts as a share of the possible range, 0 to 1.
        rollouts: of each task.
    """
    found = {policy: dict(known) for policy, known in estimates.items()}
    for policy, its in rewards.items():
        known = found.setdefault(policy, {})
        for task, reward in its.items():
            successes, failures = known.get(task, (0.0, 0.0))
            known[task] = (
                FORGET * successes + rollouts * reward,
                FORGET * failures + rollouts * (1 - reward),
            )
    return found


def sample(weights: Mapping[int, float], count: int, name: str) -> list[int]:
    """Sample distinct positions in proportion to their weights, one after the other; the same for the same name.

    Each position gets the key log(u) / w, and the largest keys are taken (Efraimidis and Spirakis 2006).
    """
    numbers = random.Random(name)
    keys = {place: math.log(1.0 - numbers.random()) / own for place, own in sorted(weights.items())}
    return heapq.nlargest(count, keys, key=keys.__getitem__)
