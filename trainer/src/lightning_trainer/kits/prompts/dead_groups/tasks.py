"""Dead tasks, and the instructions that were tried on them: everything that a resumed run must know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

PROVE: Final = 3  # maximum tasks on which an instruction without successes is tried


@dataclass
class Instruction:
    """A text that replaces an agent's own prompt.

    Attributes:
        agent: whose prompt it replaces.
        text: the instruction.
        tried: by digest of the task: whether a rollout under it solved the task.
    """

    agent: str
    text: str
    tried: dict[str, bool] = field(default_factory=dict)

    @property
    def solved(self) -> int:
        """Number of tasks that it solved."""
        return sum(self.tried.values())


@dataclass
class DeadTasks:
    """A run's dead tasks. A task is named by its digest.

    Attributes:
        lowest: the lowest reward so far, 0 if that is less, or the lower end of the declared range.
        visits: by task: number of consecutive steps in which every rollout had the lowest reward.
        own: prompt of each agent that can be instructed.
        instructions: in the order in which they were proposed.
        groups: number of dead groups so far.
        tokens: of rollouts under an instruction.
        rollouts: number of rollouts under an instruction.
    """

    lowest: float = 0.0
    visits: dict[str, int] = field(default_factory=dict)
    own: dict[str, str] = field(default_factory=dict)
    instructions: list[Instruction] = field(default_factory=list)
    groups: int = 0
    tokens: int = 0
    rollouts: int = 0

    @classmethod
    def from_json(cls, kept: Mapping[str, Any]) -> DeadTasks:
        """Read the output of `to_json`; empty for a new run."""
        instructions = [Instruction(**each) for each in kept.get("instructions", ())]
        return cls(**{**kept, "visits": dict(kept.get("visits", {})), "instructions": instructions})

    def to_json(self) -> dict[str, Any]:
        """Return the state as JSON."""
        return asdict(self)

    @property
    def tried(self) -> set[str]:
        """Tasks that were sampled under an instruction."""
        return {task for instruction in self.instructions for task in instruction.tried}

    @property
    def solved(self) -> set[str]:
        """Tasks that an instruction solved."""
        return {task for each in self.instructions for task, solved in each.tried.items() if solved}

    def visit(self, rewards: Mapping[str, Sequence[float]], least: float | None = None) -> list[str]:
        """Count the rollouts of a step.

        Args:
            rewards: by task: of the rollouts that count; -inf for a failure.
            least: lower end of the range of rewards, if it is declared.

        Returns:
            The dead tasks of the step.
        """
        seen = [reward for its in rewards.values() for reward in its if reward > float("-inf")]
        lowest = min([self.lowest, *seen]) if least is None else least
        if lowest != self.lowest:  # until now, better rewards than this counted as failures
            self.lowest, self.visits = lowest, {}
        dead = [task for task, its in rewards.items() if its and max(its) <= lowest]
        for task in dead:
            self.visits[task] = self.visits.get(task, 0) + 1
        for task in rewards.keys() - dead:
            if rewards[task]:
                self.visits.pop(task, None)
        self.groups += len(dead)
        return dead

    def choose(self, task: str) -> Instruction | None:
        """Return the known instruction to try on a task next; None if all promising ones were tried.

        One that solved the task comes first, then those that solved the largest share of other tasks. One that has
        solved nothing is tried on three tasks.
        """
        those = [each for each in self.instructions if each.tried.get(task, each.solved > 0 or len(each.tried) < PROVE)]
        return max(those, key=lambda each: (task in each.tried, each.solved / (len(each.tried) or 1)), default=None)
