"""Runs held-out tasks, once for the base and for each result of a method. Existing evaluations are resumed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lightning_trainer.kits.evaluation import folder as files
from lightning_trainer.kits.evaluation.config import EvalConfig
from lightning_trainer.kits.evaluation.evaluate import evaluate, resumed
from lightning_trainer.kits.evaluation.samples import Sample
from lightning_trainer.kits.evaluation.summary import Counting, Summary, summarise_each
from lightning_trainer.kits.improve.config import ImproveConfig
from lightning_trainer.kits.improve.halving import Rewards
from lightning_trainer.kits.improve.snapshots import Change, Snapshot
from lightning_trainer.report.progress import Progress


@dataclass(slots=True, kw_only=True)
class HeldOutMeasurement:
    """Measures on one set of held-out tasks, always with the same seeds.

    Attributes:
        config: options of the search.
        tasks: file of the set.
        progress: callback for progress events.
        agents: names of the agents whose calls the model answers; None: all that have a name.
        base: samples of the unchanged agents, once they have been measured.
        tokens: tokens of all model calls in all measurements.
    """

    config: ImproveConfig
    tasks: Path
    progress: Progress
    agents: tuple[str, ...] | None = None
    base: list[Sample] = field(default_factory=list)
    tokens: int = 0

    @property
    def counting(self) -> Counting:
        """How samples count."""
        train = self.config.train
        return Counting(failed=train.failed, timeouts=train.timeouts, agents=self.agents, declared=train.declared)

    def measure_base(self, folder: Path) -> Summary:
        """Run the tasks with the unchanged agents."""
        self.base = self._measure(folder, self.config.train.model, None)
        return self.summarise([])[0]

    def measure(self, folder: Path, snapshot: Snapshot) -> Summary:
        """Run the tasks with the weights and prompts of a snapshot; failures count as they do for the base."""
        model = self.config.train.model if snapshot.checkpoint.is_symlink() else str(snapshot.folder)
        return self.summarise([self._measure(folder, model, snapshot.prompts)])[1]

    def summarise(self, others: Iterable[list[Sample]]) -> list[Summary]:
        """Return the summary of the base, and of other samples."""
        return summarise_each([self.base, *others], self.counting)

    def _measure(self, folder: Path, model: str, prompts: Path | None) -> list[Sample]:
        if files.is_evaluation(folder):
            evaluate(resumed(folder), self.progress, resume=folder)
        else:
            evaluate(self._options(folder, model, prompts), self.progress)
        samples = files.read_samples(folder)
        usage = summarise_each([samples], self.counting)[0].usage
        self.tokens += usage.prompt_tokens + usage.response_tokens
        return samples

    def _options(self, folder: Path, model: str, prompts: Path | None) -> EvalConfig:
        train = self.config.train
        names = (
            "target", "command", "reward", "temperature", "max_tokens", "sampling", "seed", "timeout_s", "max_attempts",
            "workers", "concurrency", "isolate", "name_by", "work",
        )  # fmt: skip
        return EvalConfig(
            data=self.tasks, model=model, prompts=prompts, agents=self.agents, samples=self.config.samples,
            counting=self.counting, out=folder, load=self.config.load, **{name: getattr(train, name) for name in names},
        )  # fmt: skip


@dataclass(slots=True, kw_only=True)
class Finals:
    """Measures candidates on the tasks that decide.

    Attributes:
        held_out: measures on these tasks.
        names: adapter of each agent.
        changes: the candidate of each agent that has one.
        folder: folder of snapshots and evaluations.
        measured: summaries, by the agents with their candidates; () is the base.
    """

    held_out: HeldOutMeasurement
    names: Mapping[str, str]
    changes: Mapping[str, Change]
    folder: Path
    measured: dict[tuple[str, ...], Summary] = field(default_factory=dict)

    def base(self) -> Rewards:
        """Run the tasks with the unchanged agents."""
        self.held_out.progress.note("the held-out tasks that decide, with the unchanged agents")
        self.folder.mkdir(exist_ok=True)
        self.measured[()] = self.held_out.measure_base(self.folder / "base")
        return self.measured[()].by_task

    def measure(self, agents: Sequence[str]) -> Rewards:
        """Run the tasks with the candidates of some agents, and the others unchanged."""
        name = "-".join(self.names[agent] for agent in agents)
        self.held_out.progress.note(f"the held-out tasks that decide, with what was found for {', '.join(agents)}")
        snapshot = Snapshot(self.folder / f"with-{name}")
        snapshot.write(self.held_out.config.train, self.names, {agent: self.changes[agent] for agent in agents})
        found = self.measured[tuple(agents)] = self.held_out.measure(self.folder / f"{name}-held-out", snapshot)
        return found.by_task


def rollout_tokens(samples: list[Sample]) -> float:
    """Return the mean tokens of the model calls of a rollout, prompts and answers; at least 1."""
    summary = summarise_each([samples], Counting())[0]
    return max(1.0, (summary.usage.prompt_tokens + summary.usage.response_tokens) / max(1, len(samples)))
