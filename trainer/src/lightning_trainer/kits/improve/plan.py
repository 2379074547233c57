"""The plan of a search: the share of each method in each rung, and the cost of measuring."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_spans.errors import ConfigError
from lightning_trainer.kits.improve.halving import rung_count
from lightning_trainer.reasons.amounts import amount


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchPlan:
    """The division of a budget.

    Attributes:
        agents: the agents to improve.
        methods: methods of each agent.
        budget: tokens of all agents together.
        least: fewest tokens that a method needs, by method.
        rollout_tokens: tokens of a rollout of the unchanged program.
        to_choose: rollouts of one measurement on the held-out tasks for choosing.
        to_decide: the same for the other held-out tasks.
    """

    agents: Sequence[str]
    methods: Sequence[str]
    budget: int
    least: Mapping[str, int]
    rollout_tokens: float
    to_choose: int
    to_decide: int

    @property
    def rungs(self) -> list[tuple[int, int]]:
        """The number of methods, and the tokens of each, for each rung."""
        count, left, rungs = len(self.methods), self.budget // len(self.agents), []
        for rung in range(rung_count(count), 0, -1):
            rungs.append((count, left // rung // count))
            left -= left // rung
            count = math.ceil(count / 2)
        return rungs

    @property
    def measured_rollouts(self) -> int:
        """The largest number of rollouts on held-out tasks."""
        agents = len(self.agents)
        chosen = 1 + agents * sum(count for count, _ in self.rungs) + (agents > 1)
        decided = 1 + agents + (agents > 1)
        return chosen * self.to_choose + decided * self.to_decide

    def check(self, *, measured: bool = True) -> None:
        """Reject a budget that is too small for the first rung.

        Args:
            measured: whether `rollout_tokens` was measured; otherwise no rollout can have fewer.

        Raises:
            ConfigError: the budget is too small; the message says how much is needed.
        """
        _, share = self.rungs[0]
        method = max(self.methods, key=lambda name: self.least[name])
        if share >= self.least[method]:
            return
        needed = self.least[method] * len(self.agents) * len(self.methods) * len(self.rungs)
        about, give = "about", f"Give {needed} or more"
        if not measured:
            about, give = "at least", f"Give more than {needed} (--dry-run measures how many)"
        rungs = amount(len(self.rungs), "rung")
        raise ConfigError(
            f"--budget {self.budget} gives each method {share} tokens in the first of {rungs}, and {method} needs"
            f" {about} {self.least[method]}. {give}, name fewer methods with --methods, or make a step smaller"
            " (--batch-size, --group-size)."
        )

    def lines(self) -> list[str]:
        """Return the plan as lines of text."""
        agents = len(self.agents)
        found = [
            f"agents: {', '.join(self.agents)}; {amount(self.budget // agents, 'token')} each",
            f"methods of each: {', '.join(self.methods)}",
            f"a rollout of the unchanged program has about {amount(round(self.rollout_tokens), 'token')}",
        ]
        for number, (count, share) in enumerate(self.rungs, 1):
            rollouts = share / self.rollout_tokens
            found.append(
                f"rung {number}: {amount(count, 'method')} with {share} tokens each, as in {rollouts:.0f} rollouts"
            )
        tokens = self.measured_rollouts * self.rollout_tokens
        found.append(
            f"measuring: up to {self.measured_rollouts} rollouts on held-out tasks, about {tokens:.0f} tokens, which"
            " are not part of the budget"
        )
        return found

    def to_json(self) -> dict[str, Any]:
        """Return what `--dry-run --json` prints."""
        return {
            "agents": list(self.agents),
            "methods": list(self.methods),
            "budget": self.budget,
            "rollout_tokens": round(self.rollout_tokens),
            "rungs": [{"methods": count, "tokens": share} for count, share in self.rungs],
            "least": dict(self.least),
            "measured_rollouts": self.measured_rollouts,
            "measured_tokens": round(self.measured_rollouts * self.rollout_tokens),
        }
