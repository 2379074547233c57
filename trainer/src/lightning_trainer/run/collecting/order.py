"""The tasks of each step: in shuffled passes, or after the first pass by the policies' success (`task_order`)."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lightning_trainer.intervals import reward_bounds
from lightning_trainer.report.teams.cliffs import rewarded_names
from lightning_trainer.rl.resampling import other_tasks
from lightning_trainer.rl.scores import BY_TASK, Score, task_digest
from lightning_trainer.run.collecting.curriculum import Estimates, learn, sample, weight
from lightning_trainer.run.data import batch_at

if TYPE_CHECKING:
    from lightning_trainer.config.train import TrainConfig
    from lightning_trainer.rl.rows import Row


class TaskOrder:
    """Chooses the tasks of each step, the same for the same seed and the same rewards so far.

    Args:
        config: of the run.
        tasks: of the run.
        estimates: of the run that goes on.
    """

    def __init__(self, config: TrainConfig, tasks: Sequence[Mapping[str, Any]], estimates: Estimates) -> None:
        self._config = config
        self._count = len(tasks)
        self._curriculum = config.task_order == "curriculum"
        self._digests = [task_digest(task) for task in tasks] if self._curriculum else []
        self._estimates = estimates

    def places(self, step: int) -> list[int]:
        """Return the tasks of a step. The first pass goes through all of them, whatever the order."""
        size, seed = self._config.batch_size, self._config.seed
        shuffled = batch_at(step, self._count, size, seed)
        left = max(0, self._count - step * size)  # of the first pass
        if not self._curriculum or left >= size or size > self._count:
            return shuffled
        first = shuffled[:left]
        return first + sample(self._weights(set(first)), size - left, f"{seed}/{step}")

    def others(self, count: int, taken: Sequence[int], name: str) -> list[int]:
        """Return tasks for groups that are replaced, if there are enough that are not in the step yet.

        `other_tasks`.
        """
        if not self._curriculum:
            return other_tasks(count, taken, self._count, name)
        fresh = sample(self._weights(set(taken)), count, name)
        return fresh + random.Random(name).choices(range(self._count), k=count - len(fresh))

    def learn(self, result: Score, rows: Iterable[Row]) -> Estimates:
        """Count the rewards of a step, and return the estimates: each policy by the rewards of its own agents.

        Rewards outside 0 to 1 count as a share of the range between the step's lowest and highest.
        """
        if self._curriculum:
            groups = rewarded_names([{BY_TASK: result.by_task}], {row.agent: row.policy for row in rows})
            rewards = {policy: _shares(result.by_task, names) for policy, names in groups.items()}
            self._estimates = learn(self._estimates, rewards, self._config.group_size)
        return self._estimates

    def _weights(self, taken: set[int]) -> dict[int, float]:
        """Return the weight of each task that is not taken."""
        return {
            place: weight(self._estimates, digest) for place, digest in enumerate(self._digests) if place not in taken
        }


def _shares(by_task: Mapping[str, Mapping[str, float]], names: Sequence[str]) -> dict[str, float]:
    """Return the mean reward of these names by task, as a share of the possible range."""
    given: defaultdict[str, list[float]] = defaultdict(list)
    for name in names:
        for task, value in by_task.get(name, {}).items():
            given[task].append(value)
    means = {task: sum(its) / len(its) for task, its in given.items()}
    low, high, _ = reward_bounds(means.values())
    return {task: (mean - low) / (high - low) for task, mean in means.items()}
