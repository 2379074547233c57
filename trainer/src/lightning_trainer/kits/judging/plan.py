"""The plan of a judge that is a model: its options, and the judge that they open."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_spans.store import Store
from lightning_trainer.kits.judging.judge import GroupJudge
from lightning_trainer.kits.judging.options import JudgeOptions, read_options


@dataclass(frozen=True, slots=True)
class ModelJudgePlan:
    """`lightning_trainer.judges.JudgePlan` of a model on a server.

    Attributes:
        options: of the judge.
    """

    options: JudgeOptions

    @property
    def concurrency(self) -> int:
        """Number of groups that are judged at once."""
        return self.options.concurrency

    @property
    def longest_s(self) -> float:
        """Maximum seconds for a group."""
        return self.options.longest_s

    def open(self, store: Store, *, seed: int, cache: Path | None) -> GroupJudge:
        """Open the judge."""
        return GroupJudge(self.options, store, seed=seed, cache=cache)


def plan_model_judge(table: Mapping[str, Any]) -> ModelJudgePlan:
    """Read the table `judge` of a configuration.

    Raises:
        ConfigError: an option is missing, unknown or wrong.
    """
    return ModelJudgePlan(read_options(table))
