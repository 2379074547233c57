"""The search for one agent: each method has its own folder; the result of each rung is stored and measured."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from lightning_trainer.kits.evaluation.samples import Sample
from lightning_trainer.kits.improve.halving import MethodResult, Rewards, Spending, States, halve
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
        samples: of each measured state on these tasks, by method and rung.
    """

    held_out: HeldOutMeasurement
    samples: dict[tuple[str, int], list[Sample]] = field(default_factory=dict)

    def run(self, budget: int) -> dict[str, MethodResult]:
        """Spend this agent's share of the budget."""
        return halve(
            self.config.methods, budget, self._spend, self._measure,
            followers=self.config.followers, declared=self.config.train.declared,
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

    def _measure(self, name: str, rung: int) -> tuple[Rewards, States]:
        self.progress.note(f"{self.agent}, {name}, rung {rung}: the held-out tasks to choose by")
        samples = self.held_out.samples(self.evaluation(name, rung), self.snapshot(name, rung))
        self.samples[name, rung] = samples
        base, *states = self.held_out.summarise(self.samples.values())
        if (mean := states[-1].reward.mean) is not None:
            self.progress.note(f"{self.agent}, {name}, rung {rung}: reward {decimal(mean)}")
        return base.by_task, {state: its.by_task for state, its in zip(self.samples, states, strict=True)}
