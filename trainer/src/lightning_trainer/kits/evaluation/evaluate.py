"""`evaluate()`: sample each task with one subject or two, and summarise the results."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lightning_spans.errors import ConfigError
from lightning_trainer.config.passwords import with_passwords
from lightning_trainer.intervals import Estimate
from lightning_trainer.judges import CACHE_NAME, JudgePlan, open_judge, read_judge
from lightning_trainer.kits.evaluation import folder as files
from lightning_trainer.kits.evaluation.config import BearerKeys, EvalConfig, read_counting
from lightning_trainer.kits.evaluation.measurement import Measurement
from lightning_trainer.kits.evaluation.program import read_program
from lightning_trainer.kits.evaluation.samples import Sample
from lightning_trainer.kits.evaluation.summary import (
    Summary,
    difference,
    differences_by_agent,
    join_equal_tasks,
    summarise_each,
)
from lightning_trainer.report.failures import most_frequent_error
from lightning_trainer.report.progress import Progress, Silent
from lightning_trainer.run.data import Task, digest, load_tasks
from lightning_trainer.run.interrupts import SavedInterrupt, defer_interrupts
from lightning_trainer.runner.target import JUDGE
from lightning_trainer.session.answers import (
    OF_CALLS,
    LocalModel,
    Subject,
    chosen_agents,
    name_rules,
    read_subject,
    refuse_unheard,
)
from lightning_trainer.session.fingerprint import ProgramFingerprint
from lightning_trainer.session.folder import check_unchanged, open_folder
from lightning_trainer.session.session import STORE_NAME, open_database


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Result of an evaluation.

    Attributes:
        summary: of the evaluated subject.
        name: of the subject.
        folder: of the evaluation.
        seconds: duration, including that of earlier parts.
        against: summary of the baseline; None without one.
        against_name: name of the baseline.
        failure: the most frequent error if no sample succeeded; otherwise None.
        program: fingerprint of what the program gave its agents.
    """

    summary: Summary
    name: str
    folder: Path
    seconds: float
    against: Summary | None = None
    against_name: str | None = None
    failure: str | None = None
    program: ProgramFingerprint | None = None

    def to_json(self) -> dict[str, Any]:
        """Return what `lightning-rl eval --json` prints."""
        line = {"evaluated": self.name, **self.summary.to_json(), "seconds": round(self.seconds, 1)}
        if self.against is not None:
            found, tasks = difference(self.summary, self.against)
            line |= {
                "by_agent": _compare_agents(line["by_agent"], differences_by_agent(self.summary, self.against)),
                "difference": found.mean,
                "difference_low": found.low,
                "difference_high": found.high,
                "difference_tasks": tasks,
                "against": {"evaluated": self.against_name, **self.against.to_json()},
            }
        return {**line, files.PROGRAM: self.program and self.program.to_json(), "folder": str(self.folder)}


def _compare_agents(
    by_agent: Mapping[str, Mapping[str, Any]], found: Mapping[str, tuple[Estimate, int]]
) -> dict[str, dict[str, Any]]:
    """Return each agent's entry with its difference. `low` and `high` become the interval of the difference."""
    compared = {}
    for name, own in by_agent.items():
        means = {"mean_low": own["low"], "mean_high": own["high"]}
        rise, tasks = found.get(name, (Estimate(None), 0))
        compared[name] = {**own, **means, **rise.to_json(), "mean": own["mean"], "difference": rise.mean, "n": tasks}
    return compared


def evaluate(
    config: EvalConfig, progress: Progress | None = None, *, resume: Path | None = None, keys: BearerKeys | None = None
) -> Evaluation:
    """Evaluate one subject, or compare two.

    Ctrl-C or SIGTERM ends it, and raises `KeyboardInterrupt`; finished samples are kept.

    Args:
        config: the options; to resume, those that `config_to_resume` returned.
        progress: callback for progress events. Default: none.
        resume: folder of an evaluation to resume: only unfinished samples are run, and those that failed for a reason
            other than the model.
        keys: of servers.

    Raises:
        LightningError: an option, a file or the agent is wrong, or every sample failed.
    """
    began, progress, keys = time.monotonic(), progress or Silent(), keys or BearerKeys()
    tasks = load_tasks(config.data, config.columns)[: config.tasks]
    judging = _judge_plan(config)
    subject, other = config.subject(keys.endpoint), _other(config, tasks, keys)
    config.read_prompts()  # raises if they cannot be read
    if resume is None:
        refuse_unheard({name: getattr(config, name) for name in OF_CALLS}, subject, other)
    sides = [side for side in (subject, other) if isinstance(side, LocalModel)]
    agents = config.agents or next(filter(None, map(chosen_agents, sides)), None)
    rules = config.name_by or next(filter(None, map(name_rules, sides)), ())
    declared = config.work.declared(command=config.command, reward=config.reward)
    counting = replace(config.counting, agents=agents, declared=declared)
    config = config.with_values(agents=agents, name_by=rules, counting=counting)
    with open_folder(
        config.out, resume, base=files.EVALS, begun=files.has_samples, resumable=files.is_evaluation
    ) as folder:
        asked = _begin_record(config, tasks, folder, resume)
        subjects = [subject] if other is None or isinstance(other, Path) else [subject, other]
        try:
            drawn, program = _measure(
                config, tasks, subjects, folder=folder, name=asked["id"], progress=progress, judging=judging
            )
        finally:
            seconds = asked["seconds"] + time.monotonic() - began
            files.write_options(folder, {**asked, "seconds": seconds})
        if isinstance(other, Path):
            drawn.append(files.read_samples(other))
    found = summarise_each([join_equal_tasks(side, tasks) for side in drawn], config.counting)
    result = Evaluation(
        summary=found[0],
        name=subject.name,
        folder=folder,
        seconds=seconds,
        against=found[1] if len(found) > 1 else None,
        failure=_failure(drawn[0]),
        program=program,
        against_name=None if other is None else str(other) if isinstance(other, Path) else other.name,
    )
    files.write_summary(folder, result.to_json())
    return result


def _failure(samples: Sequence[Sample]) -> str | None:
    if any(sample.status == "succeeded" for sample in samples):
        return None
    error = most_frequent_error([sample.error or "" for sample in samples])
    return f"none of {len(samples)} samples succeeded. {error}"


def _measure(
    config: EvalConfig,
    tasks: Sequence[Task],
    subjects: Sequence[Subject],
    *,
    folder: Path,
    name: str,
    progress: Progress,
    judging: JudgePlan | None,
) -> tuple[list[list[Sample]], ProgramFingerprint]:
    """Measure one subject after the other, so that two models need not be in memory together.

    Returns:
        The samples of each, and the fingerprint of the program with the first.
    """
    drawn = []
    with ExitStack() as stack:
        check = stack.enter_context(defer_interrupts(progress.stopping))
        store = stack.enter_context(open_database(config.store or str(folder / STORE_NAME)))
        judge = stack.enter_context(open_judge(judging, store, seed=config.seed or 0, cache=folder / CACHE_NAME))
        for subject, suffix in zip(subjects, ("", "b"), strict=False):
            place = folder / "against" if suffix else folder
            place.mkdir(exist_ok=True)
            try:
                side = Measurement(
                    config=config,
                    subject=subject,
                    tasks=tasks,
                    store=store,
                    name=f"eval-{name}{suffix}",
                    folder=place,
                    progress=progress,
                    check=check,
                    judge=judge,
                    prompted=not suffix,  # the baseline keeps the program's own prompts
                )
                drawn.append(side.measure())
            except SavedInterrupt:
                raise SavedInterrupt(f"stopped. Continue with: lightning-rl eval --resume {folder}") from None
        return drawn, read_program(store, drawn[0], config.read_prompts())


def config_to_resume(folder: Path, again: Mapping[str, Any] | None = None) -> EvalConfig:
    """Return the options of an evaluation to resume.

    Args:
        folder: of the evaluation.
        again: options in the form of `EvalConfig.to_json`, from which those that had a password are taken.

    Raises:
        ConfigError: there is none, or an option that had a password is not given again.
    """
    return EvalConfig.from_json(with_passwords(files.read_options(folder)["config"], again or {}))


def _begin_record(config: EvalConfig, tasks: Sequence[Task], folder: Path, resume: Path | None) -> dict[str, Any]:
    if resume is not None:
        asked = files.read_options(folder)
        check_unchanged(folder, asked, {"tasks": digest(tasks)}, f"They are in {config.data}.")
        return asked
    asked = {"id": uuid.uuid4().hex[:12], "tasks": digest(tasks), "seconds": 0.0, "config": config.to_json()}
    files.write_options(folder, asked)
    return asked


def _judge_plan(config: EvalConfig) -> JudgePlan | None:
    """Read the plan of the judge; None if there is no judge.

    Raises:
        ConfigError: an option is wrong, or the rewards of two sides would be compared, but a judge sees one at a time.
    """
    judging = read_judge(config.reward, config.judge)
    if judging is not None and config.against is not None:
        raise ConfigError(
            "a judge ranks the samples of a task against each other, "
            "and never compares the samples of two models, so a difference has no meaning. Leave --against out, or give"
            " a reward that scores one sample by itself,"
            " --reward module:function, and leave --judge out."
        )
    return judging


def _other(config: EvalConfig, tasks: Sequence[Task], keys: BearerKeys) -> Subject | Path | None:
    """Return the baseline: an existing evaluation, or another subject; None without one."""
    if config.against is None:
        return None
    folder = Path(config.against).expanduser()
    if not files.is_evaluation(folder):
        return read_subject(config.against, key=keys.against)
    asked = files.read_options(folder)
    if asked["tasks"] != digest(tasks):
        raise ConfigError(f"the evaluation {folder} is of other tasks than {config.data}. Evaluate both on the same.")
    if asked["config"]["judge"] or asked["config"]["reward"] == JUDGE:
        raise ConfigError(
            f"a judge gave the rewards of the evaluation {folder}: "
            "it compared only the samples of that evaluation. Evaluate both with a reward that scores one sample by"
            " itself: --reward module:function."
        )
    own, its = config.counting, read_counting(asked["config"])
    if (own.failed == "exclude") != (its.failed == "exclude"):
        raise ConfigError(
            f"the evaluation {folder} has --failed {its.failed}, and this one {own.failed}: "
            "only with exclude are failed rollouts tried again, so the two can't be compared. Evaluate both with the"
            " same --failed."
        )
    if own.failed != "exclude" and own.timeouts != its.timeouts:
        raise ConfigError(
            f"the evaluation {folder} has --timeouts {its.timeouts}, and this one {own.timeouts}: "
            "only with exclude are samples that were too slow left out, so the two can't be compared. Evaluate both"
            " with the same --timeouts."
        )
    files.read_samples(folder)
    return folder
