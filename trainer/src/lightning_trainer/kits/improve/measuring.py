"""Runs held-out tasks, once for the base and for each result of a method. Existing evaluations are resumed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from lightning_trainer.kits.evaluation import folder as files
from lightning_trainer.kits.evaluation.config import EvalConfig
from lightning_trainer.kits.evaluation.evaluate import config_to_resume, evaluate
from lightning_trainer.kits.evaluation.samples import Sample
from lightning_trainer.kits.evaluation.summary import Counting, Summary, summarise_each
from lightning_trainer.kits.improve.config import ImproveConfig
from lightning_trainer.kits.improve.halving import Rewards
from lightning_trainer.kits.improve.snapshots import Change, Snapshot
from lightning_trainer.report.progress import Progress
from lightning_trainer.run.data import load_tasks


@dataclass(slots=True, kw_only=True)
class HeldOutMeasurement:
    """Measures on one set of held-out tasks, always with the same seeds.

    Attributes:
        config: options of the search.
        tasks: file of the set.
        progress: callback for progress events.
        agents: names of the agents to improve, whose rewards count; None: all that have a name. The model answers
            their calls, and those of the agents that are to stay unchanged.
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

    def samples(self, folder: Path, snapshot: Snapshot) -> list[Sample]:
        """Run the tasks with the weights and prompts of a snapshot, and return the samples."""
        model = self.config.train.model if snapshot.checkpoint.is_symlink() else str(snapshot.folder)
        return self._measure(folder, model, snapshot.prompts)

    def summarise(self, others: Iterable[list[Sample]]) -> list[Summary]:
        """Return the summary of the base, and of other samples, with the same reward for failures."""
        return summarise_each([self.base, *others], self.counting)

    def _measure(self, folder: Path, model: str, prompts: Path | None) -> list[Sample]:
        if files.is_evaluation(folder):
            again = self._options(folder, model, prompts).to_json()
            evaluate(config_to_resume(folder, again), self.progress, resume=folder)
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
        answered = None if self.agents is None else (*self.agents, *self.config.unchanged)
        return EvalConfig(
            data=self.tasks, model=model, prompts=prompts, agents=answered, samples=self.config.samples,
            counting=self.counting, out=folder, load=self.config.load, **{name: getattr(train, name) for name in names},
        )  # fmt: skip


@dataclass(slots=True, kw_only=True)
class Finals:
    """Measures candidates on all held-out tasks: those that chose them, then those that did not.

    Attributes:
        choose: has measured the base on the tasks that chose the candidates.
        fresh: measures on the other tasks.
        names: adapter of each agent.
        changes: the candidate of each agent that has one.
        chosen_by: folder of the evaluation that chose each agent's candidate.
        folder: folder of snapshots and evaluations.
        measured: summaries of all held-out tasks without and with candidates, by the agents that have them.
    """

    choose: HeldOutMeasurement
    fresh: HeldOutMeasurement
    names: Mapping[str, str]
    changes: Mapping[str, Change]
    chosen_by: Mapping[str, Path]
    folder: Path
    measured: dict[tuple[str, ...], tuple[Summary, Summary]] = field(default_factory=dict)

    @property
    def fresh_tasks(self) -> int:
        """Number of tasks on which the base counts and by which nothing was chosen."""
        return len(self.fresh.summarise([])[0].by_task)

    def measure_base(self) -> Summary:
        """Run the fresh tasks with the unchanged agents, and return the summary of all."""
        self.fresh.progress.note("the other held-out tasks, with the unchanged agents")
        self.folder.mkdir(exist_ok=True)
        self.fresh.measure_base(self.folder / "base")
        return summarise_each([self._base], self.fresh.counting)[0]

    def measure(self, agents: Sequence[str]) -> tuple[Rewards, Rewards]:
        """Measure the candidates of some agents, with the others unchanged, and return the base's rewards and these."""
        name = "-".join(self.names[agent] for agent in agents)
        self.fresh.progress.note(f"the other held-out tasks, with what was found for {', '.join(agents)}")
        snapshot = Snapshot(self.folder / f"with-{name}")
        snapshot.write(self.fresh.config.train, self.names, {agent: self.changes[agent] for agent in agents})
        fresh = self.fresh.samples(self.folder / f"{name}-held-out", snapshot)
        if len(agents) == 1:
            known = files.read_samples(self.chosen_by[agents[0]])
        else:
            known = self.choose.samples(self.folder / f"{name}-choose", snapshot)
        both = _join(known, fresh, self._known_tasks)
        before, after = summarise_each([self._base, both], self.fresh.counting)
        self.measured[tuple(agents)] = before, after
        return before.by_task, after.by_task

    @property
    def _known_tasks(self) -> int:
        return len(load_tasks(self.choose.tasks))

    @property
    def _base(self) -> list[Sample]:
        return _join(self.choose.base, self.fresh.base, self._known_tasks)


def _join(known: Sequence[Sample], fresh: Sequence[Sample], tasks: int) -> list[Sample]:
    """Return the samples of both sets of tasks, the second numbered after the `tasks` of the first."""
    return [*known, *(replace(sample, task=sample.task + tasks) for sample in fresh)]


def rollout_tokens(samples: list[Sample]) -> float:
    """Return the mean tokens of the model calls of a rollout, prompts and answers; at least 1."""
    summary = summarise_each([samples], Counting())[0]
    return max(1.0, (summary.usage.prompt_tokens + summary.usage.response_tokens) / max(1, len(samples)))
