"""The search for one agent: each method has its own folder; the result of each rung is stored and measured."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from lightning_trainer.kits.evaluation.summary import Summary
from lightning_trainer.kits.improve.halving import MethodResult, Rewards, Spending, halve
from lightning_trainer.kits.improve.measuring import HeldOutMeasurement
from lightning_trainer.kits.improve.methods import KINDS, AgentTask, Method
from lightning_trainer.kits.improve.snapshots import PROMPTS_NAME, Change, Snapshot
from lightning_trainer.models import NEWEST
from lightning_trainer.report.metrics import write_atomically
from lightning_trainer.report.terminal import decimal


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSearch(AgentTask):
    """Finds the best method for one agent, with the others unchanged.

    Attributes:
        held_out: measures on the tasks for choosing; the base is already measured.
        base: summary of the base on these tasks.
    """

    held_out: HeldOutMeasurement
    base: Summary

    def run(self, budget: int) -> dict[str, MethodResult]:
        """Spend this agent's share of the budget."""
        return halve(
            self.config.methods, budget, self.base.by_task, self._spend, self._measure,
            followers=self.config.followers, declared=self.base.declared,
        )  # fmt: skip

    def method(self, name: str) -> Method:
        """Return a method, ready to spend."""
        return KINDS[name](
            config=self.config, agent=self.agent, names=self.names, folder=self.folder / name / "run",
            tasks=self.tasks, rollout_tokens=self.rollout_tokens, progress=self.progress,
        )  # fmt: skip

    def snapshot(self, method: str, rung: int) -> Snapshot:
        """Return the snapshot of a method's result at the end of a rung."""
        return Snapshot(self.folder / method / f"rung-{rung}")

    def change(self, method: str, rung: int) -> Change:
        """Return the same result as a change for another snapshot."""
        folder = self.snapshot(method, rung).folder
        prompts = folder / PROMPTS_NAME
        return Change(prompts=prompts) if prompts.is_file() else Change(checkpoint=folder / NEWEST)

    def evaluation(self, method: str, rung: int) -> Path:
        """Return the folder of the evaluation of this snapshot on the tasks for choosing."""
        return self.folder / method / f"rung-{rung}-held-out"

    def _spend(self, name: str, rung: int, limit: int) -> Spending:
        """Run a method for a rung, or return its stored result if it has run."""
        kept = self.folder / name / f"rung-{rung}.json"
        if kept.exists():
            return Spending(**json.loads(kept.read_text(encoding="utf-8")))
        self.progress.note(f"{self.agent}, {name}, rung {rung}: up to {limit} tokens in all")
        method = self.method(name)
        method.folder.parent.mkdir(parents=True, exist_ok=True)
        spending = method.spend(limit, rung)
        if spending.changed:
            self.snapshot(name, rung).write(self.config.train, self.names, {self.agent: method.change()})
        if spending.ended is not None:
            self.progress.note(f"{self.agent}, {name}: {spending.ended.splitlines()[0]}")
        write_atomically(kept, (json.dumps(asdict(spending), indent=2) + "\n").encode())
        return spending

    def _measure(self, name: str, rung: int) -> Rewards:
        self.progress.note(f"{self.agent}, {name}, rung {rung}: the held-out tasks to choose by")
        snapshot = self.snapshot(name, rung)
        summary = self.held_out.measure(self.evaluation(name, rung), snapshot)
        if summary.reward.mean is not None:
            self.progress.note(f"{self.agent}, {name}, rung {rung}: reward {decimal(summary.reward.mean)}")
        return summary.by_task
