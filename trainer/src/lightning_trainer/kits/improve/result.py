"""The result of a search, and its two validations in the format of a run, which `runs` and the viewer show."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from lightning_trainer.kits.evaluation.summary import Summary
from lightning_trainer.kits.improve.decision import UNCHANGED, Decision
from lightning_trainer.kits.improve.halving import MethodResult
from lightning_trainer.report.metrics import LOG_NAME, write_atomically
from lightning_trainer.rl.scores import BY_TASK, Score

RESULT_NAME: Final = "result.json"  # in the folder
BASE_METHOD: Final = "base"


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentResult:
    """The result for one agent.

    Attributes:
        methods: result of each method.
        candidate: the method whose result was compared with the base at the end; None: no method had a gain.
    """

    methods: Mapping[str, MethodResult]
    candidate: str | None = None

    @property
    def tokens(self) -> int:
        """Tokens of all its methods."""
        return sum(each.tokens for each in self.methods.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Improvement:
    """The result of a search.

    Attributes:
        agents: results by agent.
        decision: the final decision.
        base: summary of all held-out tasks, with the unchanged agents; None if there was no candidate.
        kept: summary of the same tasks, with the kept changes; None if nothing is kept.
        checkpoint: the model with the kept adapters, or the base.
        prompts: file with the kept prompts; None if there is none.
        budget: tokens that could be spent.
        measured: tokens of all rollouts on held-out tasks.
        tasks: number of held-out tasks for choosing, and of those that decide.
        folder: folder of the search.
        seconds: duration.
    """

    agents: Mapping[str, AgentResult]
    decision: Decision
    base: Summary | None
    kept: Summary | None
    checkpoint: Path
    prompts: Path | None
    budget: int
    measured: int
    tasks: tuple[int, int]
    folder: Path
    seconds: float

    def method_of(self, agent: str) -> str:
        """Return the method that is kept for an agent; `base` if none is."""
        candidate = self.agents[agent].candidate
        return candidate if agent in self.decision.kept and candidate is not None else BASE_METHOD

    def to_json(self) -> dict[str, Any]:
        """Return what `lightning-rl improve --json` prints."""
        agents = {}
        for name, each in self.agents.items():
            found = self.decision.differences.get(name, UNCHANGED)
            agents[name] = {
                "method": self.method_of(name), "difference": found.mean, "low": found.low, "high": found.high,
                "tokens": each.tokens, "candidate": each.candidate,
                "methods": {method: _method_json(result) for method, result in each.methods.items()},
            }  # fmt: skip
        together = self.decision.together
        return {
            "agents": agents, "checkpoint": str(self.checkpoint),
            "prompts": None if self.prompts is None else str(self.prompts),
            "difference": together.mean, "low": together.low, "high": together.high,
            "comparisons": round(self.decision.comparisons, 2),
            "base": None if self.base is None else self.base.reward.to_json(),
            "kept": None if self.kept is None else self.kept.reward.to_json(),
            "budget": self.budget, "tokens": sum(each.tokens for each in self.agents.values()),
            "measured_tokens": self.measured, "tasks_to_choose": self.tasks[0], "tasks_to_decide": self.tasks[1],
            "folder": str(self.folder), "seconds": round(self.seconds, 1),
        }  # fmt: skip


def _method_json(result: MethodResult) -> dict[str, Any]:
    best = result.best
    found = UNCHANGED if best is None else best.difference
    stage = None if best is None else best.rung
    differences = {"difference": found.mean, "low": found.low, "high": found.high}
    return {"tokens": result.tokens, **differences, "rungs": result.rung, "best_rung": stage, "ended": result.ended}


def write_metrics(folder: Path, before: Summary, after: Summary | None) -> None:
    """Write the rewards without and with the kept changes as the validations before and after one step.

    Args:
        folder: folder of the search.
        before: summary of the unchanged agents.
        after: summary with the kept changes; None: nothing is kept.
    """
    lines = [_validation(0, before), *([] if after is None else [_validation(1, after)])]
    write_atomically(folder / LOG_NAME, "".join(json.dumps(line) + "\n" for line in lines).encode())


def _validation(step: int, summary: Summary) -> dict[str, Any]:
    reward = summary.reward
    score = Score(
        reward=reward.mean, low=reward.low, high=reward.high, tasks=summary.tasks,
        by_agent={name: m for name, each in summary.by_agent.items() if name and (m := each.reward.mean) is not None},
        rollouts=summary.counted + summary.left_out, failed=summary.crashed + summary.left_out,
    )  # fmt: skip
    by_task = {"": {str(task): value for task, value in summary.by_task.items()}}
    return {"kind": "val", "step": step, "time": round(time.time(), 3), BY_TASK: by_task, **score.metrics()}
