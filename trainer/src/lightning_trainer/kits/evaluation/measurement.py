"""Measurement of one subject: run the missing samples, and reuse the existing ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Final

from lightning_spans.errors import AgentFailedError, LightningError
from lightning_spans.schema.agents import check_known, selects
from lightning_spans.schema.attempts import Rollout
from lightning_spans.store import Store
from lightning_spans.store.urls import files_of
from lightning_trainer.config.workers import worker_count
from lightning_trainer.judges import RolloutJudge, silent
from lightning_trainer.kits.evaluation import folder as files
from lightning_trainer.kits.evaluation.config import EvalConfig
from lightning_trainer.kits.evaluation.samples import Sample, read_samples
from lightning_trainer.reasons.amounts import amount
from lightning_trainer.report.agents import explain_no_calls
from lightning_trainer.report.failures import advice, most_frequent_error, where_calls_go
from lightning_trainer.report.progress import Progress
from lightning_trainer.rl.endings import LATE_LEFT_OUT_OF_FIGURES
from lightning_trainer.rl.rollouts import Outcome, outcomes
from lightning_trainer.run.data import Task
from lightning_trainer.runner.target import JUDGE, Job
from lightning_trainer.session.answers import Subject, open_answers
from lightning_trainer.session.sampling import sampling_of
from lightning_trainer.session.session import Session, open_session

_AT_ONCE: Final = 512  # rollouts that are queued together
_ENDED: Final = ("succeeded", "failed")


@dataclass(kw_only=True)
class Measurement:
    """Measures one subject.

    Attributes:
        config: the options.
        subject: the model that is measured.
        tasks: that it runs on.
        store: where rollouts and spans are saved.
        name: of the evaluation; for the baseline, with a letter added.
        folder: of the samples.
        progress: callback for progress events.
        check: raises if the evaluation was asked to stop.
        judge: gives the rewards; None: they come with the attempts.
        prompted: whether the configured prompts replace the agents' own.
        samples: existing samples, by task and number.
    """

    config: EvalConfig
    subject: Subject
    tasks: Sequence[Task]
    store: Store
    name: str
    folder: Path
    progress: Progress
    check: Callable[[], None]
    judge: RolloutJudge | None = None
    prompted: bool = True
    samples: dict[tuple[int, int], Sample] = field(default_factory=dict)
    _unjudged: list[Outcome] = field(default_factory=list, init=False)  # from earlier, of tasks whose samples all ended

    def measure(self) -> list[Sample]:
        """Run the missing samples, and return all samples."""
        generation = self._take_up()
        if self._unjudged:
            self._add(self._unjudged)
            self._leave_failed()
        missing = [
            (task, sample)
            for task in range(len(self.tasks))
            for sample in range(self.config.samples)
            if (task, sample) not in self.samples
        ]
        if self.samples:
            self.progress.note(f"{amount(len(self.samples), 'sample')} found in the folder, {len(missing)} missing")
        if missing:
            self._draw(missing, generation)
        samples = list(self.samples.values())
        if all(sample.status == "failed" for sample in samples):
            error = most_frequent_error([sample.error or "" for sample in samples])
            where = where_calls_go(error)
            todo = advice([sample.error or "" for sample in samples])
            if where and self.config.model is None:
                todo = "To use a local model, add --model."
            raise AgentFailedError(
                f"all {amount(len(samples), 'sample')} of {self.subject.name} failed. {error}\n{where}{todo}"
            )
        return samples

    def _draw(self, missing: Sequence[tuple[int, int]], generation: int) -> None:
        config, prompts = self.config, self.config.read_prompts() if self.prompted else {}
        carried = {self._rollout(place, generation).rollout_id: prompts for place in missing} if prompts else {}
        logs = self.folder / "logs"
        logs.mkdir(exist_ok=True)
        if config.counting.timeouts == "exclude":
            self.progress.note(LATE_LEFT_OUT_OF_FIGURES)
        with open_session(
            Job.of(config, withheld=(self.folder, *files_of(config.store or ""))),
            self.store,
            open_answers(self.subject, **config.load),
            replace(sampling_of(config), prompts=carried),
            workers=worker_count(config.workers, len(missing), 1 if config.isolate else config.concurrency),
            concurrency=config.concurrency,
            progress=self.progress,
            logs=logs,
            timeouts=config.counting.timeouts,
            failed=config.counting.failed,
        ) as session:
            for some in _together(missing):
                self._draw_some(session, some, generation)

    def _draw_some(self, session: Session, places: Sequence[tuple[int, int]], generation: int) -> None:
        rollouts = [self._rollout(place, generation) for place in places]
        try:
            found = session.run(rollouts, self.progress, f"samples of {self.subject.name}", check=self.check)
        except BaseException:
            self._take_up()  # keep what has ended so far
            raise
        self._refuse_unheard(self._add(found), session)

    def _add(self, found: Sequence[Outcome]) -> list[Sample]:
        """Let the judge score samples, save them, and return them.

        Raises:
            LightningError: the judge gave no verdict; the samples that it is to judge are kept.
        """
        if self.judge is not None:
            self.progress.phase("judging samples")
            found = self.judge.verdicts(found)
        new = self._read(found)
        self.samples |= {(sample.task, sample.sample): sample for sample in new}
        files.write_samples(self.folder, list(self.samples.values()))
        if (problem := silent(found)) is not None:
            raise LightningError(
                f"{problem}. The samples are kept. When the judge answers again, continue with: lightning-rl eval"
                " --resume"
                f" {self.folder}"
            )
        return new

    def _read(self, found: Sequence[Outcome]) -> list[Sample]:
        places = {outcome.rollout.rollout_id: _place(outcome.rollout.rollout_id) for outcome in found}
        return read_samples(self.store, places, found, self.config.agents, failed=self.config.counting.failed)

    def _refuse_unheard(self, samples: Sequence[Sample], session: Session) -> None:
        """Reject an evaluation that measured something else than the named subject.

        Raises:
            LightningError: no call reached the evaluated subject.
        """
        seen = {name for sample in samples for name in sample.usage if name}
        if self.config.agents is not None and seen and not any(selects(self.config.agents, name) for name in seen):
            check_known(self.config.agents, seen)
        if session.answers.model is None or all(sample.status == "failed" for sample in samples):
            return
        calls = [usage for sample in samples for usage in sample.usage.values()]
        if not calls:
            raise LightningError(explain_no_calls(len(samples), session.runner.attached, self.config.command))
        elsewhere = sum(usage.elsewhere for usage in calls)
        made = sum(usage.calls for usage in calls)
        if made and elsewhere == made:
            raise LightningError(
                f"none of {amount(made, 'model call')} reached {self.subject.name}: calls without an agent's"
                " name stay at their own endpoint. Make them inside `with lightning_spans.agent(...)`, or leave out"
                " --model and --endpoint to evaluate the program as it is."
            )
        if elsewhere:
            self.progress.note(
                f"{elsewhere} of {amount(made, 'model call')} went to their own endpoint, not to"
                f" {self.subject.name}, because their agents are not named for it or have no name"
            )

    def _take_up(self) -> int:
        """Load the samples in the store, cancel unfinished rollouts, and return the number of the next generation."""
        groups = [self._group(task) for task in range(len(self.tasks))]
        old = [
            rollout
            for first in range(0, len(groups), _AT_ONCE)
            for rollout in self.store.rollouts(group_ids=groups[first : first + _AT_ONCE])
        ]
        if not old:
            return 0
        self.store.cancel([rollout.rollout_id for rollout in old if rollout.status in {"queued", "running"}])
        ended = [rollout for rollout in old if rollout.status in _ENDED]
        places = {rollout.rollout_id: _place(rollout.rollout_id) for rollout in ended}
        waiting: list[Outcome] = []
        for first in range(0, len(ended), _AT_ONCE):
            some = outcomes(self.store, ended[first : first + _AT_ONCE], self.config.counting.timeouts)
            waiting += [outcome for outcome in some if not self._has_verdict(outcome)]
            judged = [outcome for outcome in some if self._has_verdict(outcome)]
            for sample in self._read(judged):
                if sample.status != "failed" and sample.sample < self.config.samples:
                    self.samples[sample.task, sample.sample] = sample
        if self.samples:
            files.write_samples(self.folder, list(self.samples.values()))
        there = Counter(task for task, _ in set(places.values()))
        newest = {places[outcome.rollout.rollout_id]: outcome for outcome in sorted(waiting, key=_sample_number)}
        self._unjudged = [
            outcome
            for place, outcome in sorted(newest.items())
            if place not in self.samples and there[place[0]] == self.config.samples
        ]
        return 1 + max(_generation(rollout.rollout_id) for rollout in old)

    def _leave_failed(self) -> None:
        """Leave out samples that failed for a reason other than the model, so that they are sampled again."""
        self.samples = {place: sample for place, sample in self.samples.items() if sample.status != "failed"}

    def _has_verdict(self, outcome: Outcome) -> bool:
        """Whether an earlier sample needs no judge, or has a judge's reward."""
        return (
            self.judge is None or outcome.attempt is None or any(reward.source == JUDGE for reward in outcome.rewards)
        )

    def _group(self, task: int) -> str:
        return f"{self.name}:{task}"

    def _rollout(self, place: tuple[int, int], generation: int) -> Rollout:
        task, sample = place
        return Rollout(
            # seeds depend on what follows the colon: the same for both sides, and after a resume
            rollout_id=f"{self.name}.{generation}:{task}-{sample}",
            group_id=self._group(task),
            task=self.tasks[task],
            mode="eval",
            max_attempts=self.config.max_attempts,
            timeout_s=self.config.timeout_s,
        )


def _place(rollout_id: str) -> tuple[int, int]:
    task, _, sample = rollout_id.rpartition(":")[2].partition("-")
    return int(task), int(sample)


def _together(places: Sequence[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Split the samples to run into pieces. The samples of a task stay together, because a judge compares them."""
    piece: list[tuple[int, int]] = []
    for _, its in groupby(places, key=lambda place: place[0]):
        group = list(its)
        if piece and len(piece) + len(group) > _AT_ONCE:
            yield piece
            piece = []
        piece += group
    if piece:
        yield piece


def _sample_number(outcome: Outcome) -> int:
    return _generation(outcome.rollout.rollout_id)


def _generation(rollout_id: str) -> int:
    return int(rollout_id.rpartition(":")[0].rpartition(".")[2])
