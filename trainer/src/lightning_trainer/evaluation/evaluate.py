"""`evaluate()`: draws samples of each task, from one subject or from two, and says what they come to."""

from __future__ import annotations

import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Final, Literal

from lightning_spans.errors import ConfigError, LightningError
from lightning_spans.record.prompts import Prompts, read_prompts
from lightning_spans.schema.agents import check_known, selects
from lightning_spans.schema.attempts import Rollout
from lightning_spans.store import Store
from lightning_trainer.config.workers import worker_count
from lightning_trainer.evaluation import folder as files
from lightning_trainer.evaluation.samples import Sample, read_samples
from lightning_trainer.evaluation.subjects import (
    Answering,
    AsItIs,
    LocalModel,
    Subject,
    answering,
    chosen_agents,
    read_subject,
)
from lightning_trainer.evaluation.summary import Counting, Summary, difference, summarise
from lightning_trainer.gateway.settings import Routing
from lightning_trainer.judging import JUDGE
from lightning_trainer.judging.judge import CACHE_NAME, GroupJudge
from lightning_trainer.judging.options import JudgeOptions, read_judge
from lightning_trainer.naming import parse_rules
from lightning_trainer.report.agents import nothing_captured
from lightning_trainer.report.failures import last_error
from lightning_trainer.report.progress import Progress, Silent
from lightning_trainer.rl.rollouts import Failed, Outcome, outcomes
from lightning_trainer.run.data import Task, digest, load_tasks
from lightning_trainer.run.folders import held
from lightning_trainer.run.interrupts import Interrupted, deferred
from lightning_trainer.run.local import Local, opened, serving, unnamed
from lightning_trainer.runner.runner import Runner
from lightning_trainer.runner.target import Job
from lightning_trainer.work import Work

_AT_ONCE: Final = 512  # rollouts that are queued together
_ENDED: Final = ("succeeded", "failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalConfig:
    """What to evaluate, on what, and how.

    Attributes:
        data: tasks.
        target: the agent, ``module:function``; None where `command` is given.
        command: the agent as a command.
        reward: ``module:function``, called as score(task, result), or ``judge``; None: the agent gives the reward.
        judge: options of a judge, see `judging.options`.
        model: what answers: a run, a checkpoint, a model folder, a hub id; with `endpoint` the name that it is asked
            for. None: the program's own endpoints.
        endpoint: URL of an OpenAI-compatible server.
        against: what it is compared with: an evaluation of the same tasks, or anything that can be evaluated.
        prompts: file of `lightning-rl prompts`: its system prompts are put in the place of the agents' own.
        agents: names or globs of the agents that are answered; None: those that the run trained, else all with a name.
        tasks: only the first so many.
        samples: executions of each task.
        counting: how they count.
        temperature: forced on the calls; None: as asked.
        max_tokens: most tokens of an answer that names no limit.
        sampling: whether top_p, top_k, min_p and penalties hold as agents ask for them, or are left out as in training.
        seed: of the draws; None: 0 for weights that are loaded here, and none for endpoints.
        timeout_s: time limit of an attempt.
        max_attempts: tries of what failed by no fault of the model's.
        workers: worker processes; None: one a core, and no more than there is work for.
        concurrency: attempts at once in each.
        out: folder; None: evals/DATE.
        store: URL; None: SQLite in the folder.
        load: further options of the backend that loads weights.
        name_by: rules that name the agents of calls; see `naming`.
        work: of a command: where it works, and what gives its reward.
    """

    data: Path
    target: str | None = None
    command: str | None = None
    reward: str | None = None
    judge: dict[str, Any] = field(default_factory=dict)
    model: str | None = None
    endpoint: str | None = None
    against: str | None = None
    prompts: Path | None = None
    agents: tuple[str, ...] | None = None
    tasks: int | None = None
    samples: int = 1
    counting: Counting = field(default_factory=Counting)
    temperature: float | None = None
    max_tokens: int | None = None
    sampling: Literal["plain", "asked"] = "asked"
    seed: int | None = None
    timeout_s: float = 300.0
    max_attempts: int = 2
    workers: int | None = None
    concurrency: int = 16
    out: Path | None = None
    store: str | None = None
    load: dict[str, Any] = field(default_factory=dict)
    name_by: tuple[str, ...] = ()
    work: Work = field(default_factory=Work)

    def subject(self, key: str | None) -> Subject:
        """Return what is evaluated.

        Raises:
            ConfigError: it is given wrongly.
        """
        if self.endpoint is not None:
            from lightning_trainer.evaluation.subjects import endpoint

            found = endpoint(self.endpoint, key=key)
            return replace(found, model=self.model)
        return AsItIs() if self.model is None else read_subject(self.model, key=key)

    def to_json(self) -> dict[str, Any]:
        """Return it as kept in the evaluation's folder."""
        paths = {
            name: None if (path := getattr(self, name)) is None else str(path) for name in ("data", "out", "prompts")
        }
        return {**asdict(self), **paths}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> EvalConfig:
        """Read what `to_json` gave.

        Raises:
            ConfigError: it is of another version.
        """
        try:
            failed: Failed = values["counting"]["failed"]
            counting = Counting(failed=failed, success=values["counting"]["success"])
            agents = None if values["agents"] is None else tuple(values["agents"])
            prompts = None if values.get("prompts") is None else Path(values["prompts"])
            made: dict[str, Any] = {"data": Path(values["data"]), "out": None, "prompts": prompts, "agents": agents}
            made |= {"work": Work(**values["work"]), "name_by": tuple(values["name_by"]), "counting": counting}
            return cls(**{**values, **made})
        except (KeyError, TypeError) as error:
            raise ConfigError(f"this evaluation can't go on: its options can't be read: {error}.") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class BearerKeys:
    """Bearer keys of servers, which are kept nowhere.

    Attributes:
        endpoint: of what is evaluated.
        against: of what it is compared with.
    """

    endpoint: str | None = field(default=None, repr=False)
    against: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What an evaluation came to.

    Attributes:
        summary: of what was evaluated.
        name: of it.
        folder: where it lies.
        seconds: that it took, earlier parts included.
        against: summary of what it was compared with; None without one.
        against_name: of that.
    """

    summary: Summary
    name: str
    folder: Path
    seconds: float
    against: Summary | None = None
    against_name: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return what `lightning-rl eval --json` prints."""
        line = {"evaluated": self.name, **self.summary.to_json(), "seconds": round(self.seconds, 1)}
        if self.against is not None:
            found, tasks = difference(self.summary, self.against)
            line |= {
                "difference": found.mean,
                "difference_low": found.low,
                "difference_high": found.high,
                "difference_tasks": tasks,
                "against": {"evaluated": self.against_name, **self.against.to_json()},
            }
        return {**line, "folder": str(self.folder)}


def evaluate(
    config: EvalConfig, progress: Progress | None = None, *, resume: Path | None = None, keys: BearerKeys | None = None
) -> Evaluation:
    """Evaluate.

    Ctrl-C or SIGTERM ends it, and raises `KeyboardInterrupt`; samples that have ended are kept.

    Args:
        config: what, on what, and how; of one that goes on, what `resumed` returned.
        progress: told what happens; by default nobody is.
        resume: the folder of an evaluation to go on with: only samples that have not ended are drawn, and those that
            failed by no fault of the model's.
        keys: of servers.

    Raises:
        LightningError: an option, a file or the agent is wrong, or every sample failed.
    """
    began, progress, keys = time.monotonic(), progress or Silent(), keys or BearerKeys()
    tasks = load_tasks(config.data)[: config.tasks]
    subject, other = config.subject(keys.endpoint), _other(config, tasks, keys)
    judging = read_judge(config.reward, config.judge)
    _prompts(config)  # or refuse
    if config.agents is None:
        sides = (side for side in (subject, other) if isinstance(side, LocalModel))
        config = replace(config, agents=next(filter(None, map(chosen_agents, sides)), None))
    with _folder(config.out, resume) as folder:
        asked = _asked(config, tasks, folder, resume)
        subjects = [subject] if other is None or isinstance(other, Path) else [subject, other]
        found = _measure(config, tasks, subjects, folder=folder, name=asked["id"], progress=progress, judging=judging)
        if isinstance(other, Path):
            found.append(summarise(files.read_samples(other), config.counting))
    seconds = asked["seconds"] + time.monotonic() - began
    result = Evaluation(
        summary=found[0],
        name=subject.name,
        folder=folder,
        seconds=seconds,
        against=found[1] if len(found) > 1 else None,
        against_name=None if other is None else str(other) if isinstance(other, Path) else other.name,
    )
    files.write_asked(folder, {**asked, "seconds": seconds})
    files.write_summary(folder, result.to_json())
    return result


def _measure(
    config: EvalConfig,
    tasks: Sequence[Task],
    subjects: Sequence[Subject],
    *,
    folder: Path,
    name: str,
    progress: Progress,
    judging: JudgeOptions | None,
) -> list[Summary]:
    """Measure one subject after the other: two models need not be in memory together."""
    found = []
    with ExitStack() as stack:
        check = stack.enter_context(deferred())
        store = stack.enter_context(opened(config.store or str(folder / files.STORE_NAME)))
        judge = GroupJudge(judging, store, seed=config.seed or 0, cache=folder / CACHE_NAME) if judging else None
        if judge is not None:
            stack.callback(judge.close)
        for subject, suffix in zip(subjects, ("", "b"), strict=False):
            place = folder / "against" if suffix else folder
            place.mkdir(exist_ok=True)
            try:
                side = _Side(
                    config=config,
                    subject=subject,
                    tasks=tasks,
                    store=store,
                    name=f"eval-{name}{suffix}",
                    folder=place,
                    progress=progress,
                    check=check,
                    judge=judge,
                    prompted=not suffix,  # what it is compared with keeps the program's own
                )
                found.append(summarise(side.measure(), config.counting))
            except Interrupted:
                raise Interrupted(f"stopped. Go on with: lightning-rl eval --resume {folder}") from None
    return found


@contextmanager
def _folder(out: Path | None, resume: Path | None) -> Iterator[Path]:
    """Return the evaluation's folder; a new one goes again when it fails before any sample has ended."""
    if resume is not None:
        with held(resume):
            yield resume
        return
    existed = out is not None and out.exists()
    folder = files.make(out)
    try:
        with held(folder):
            yield folder
    except Exception:
        if not (folder / files.SAMPLES_NAME).exists():
            shutil.rmtree(folder)
            if existed:
                folder.mkdir()
        raise


def resumed(folder: Path) -> EvalConfig:
    """Return the options of an evaluation that goes on.

    Raises:
        ConfigError: there is none.
    """
    return EvalConfig.from_json(files.read_asked(folder)["config"])


def _asked(config: EvalConfig, tasks: Sequence[Task], folder: Path, resume: Path | None) -> dict[str, Any]:
    if resume is not None:
        asked = files.read_asked(folder)
        if asked["tasks"] != digest(tasks):
            raise ConfigError(f"{config.data} has changed since {folder} began. Evaluate it anew, into another folder.")
        return asked
    asked = {"id": uuid.uuid4().hex[:12], "tasks": digest(tasks), "seconds": 0.0, "config": config.to_json()}
    files.write_asked(folder, asked)
    return asked


def _prompts(config: EvalConfig) -> Prompts:
    """Read the prompts that are put in the place of the agents' own; {} for none.

    Raises:
        ConfigError: they can't be read.
    """
    return read_prompts(config.prompts) if config.prompts is not None else {}


def _other(config: EvalConfig, tasks: Sequence[Task], keys: BearerKeys) -> Subject | Path | None:
    """Return what it is compared with: an evaluation that is there, or another subject."""
    if config.against is None:
        return None
    folder = Path(config.against).expanduser()
    if not files.is_evaluation(folder):
        return read_subject(config.against, key=keys.against)
    if files.read_asked(folder)["tasks"] != digest(tasks):
        raise ConfigError(f"the evaluation {folder} is of other tasks than {config.data}. Evaluate both on the same.")
    files.read_samples(folder)
    return folder


@dataclass(kw_only=True)
class _Side:
    """Measures one subject."""

    config: EvalConfig
    subject: Subject
    tasks: Sequence[Task]
    store: Store
    name: str
    folder: Path
    progress: Progress
    check: Callable[[], None]
    judge: GroupJudge | None = None
    prompted: bool = True
    samples: dict[tuple[int, int], Sample] = field(default_factory=dict)

    def measure(self) -> list[Sample]:
        """Draw what is missing, and return all samples."""
        generation = self._take_up()
        missing = [
            (task, sample)
            for task in range(len(self.tasks))
            for sample in range(self.config.samples)
            if (task, sample) not in self.samples
        ]
        if self.samples:
            self.progress.note(f"{len(self.samples)} samples are there already; {len(missing)} are missing")
        if missing:
            self._draw(missing, generation)
        samples = list(self.samples.values())
        if all(sample.status == "failed" for sample in samples):
            raise LightningError(
                f"all {len(samples)} samples of {self.subject.name} failed. The last error:\n"
                f"{last_error(samples[-1].error or '')}\nRun the agent by itself on one task, to see what is wrong."
            )
        return samples

    def _draw(self, missing: Sequence[tuple[int, int]], generation: int) -> None:
        config, prompts = self.config, _prompts(self.config) if self.prompted else {}
        carried = {self._rollout(place, generation).rollout_id: prompts for place in missing} if prompts else {}
        logs = self.folder / "logs"
        logs.mkdir(exist_ok=True)
        self.progress.phase("importing the agent")
        runner = self._runner(len(missing), logs)
        with _started(runner), answering(self.subject, **config.load) as answers:
            self.check()
            with serving(
                self.store,
                runner,
                routing=replace(self._routing(answers), prompts=carried),
                engine=list(answers.engines) or None,
                upstreams=answers.upstreams,
            ) as local:
                for some in _together(missing):
                    self._draw_some(local, answers, some, generation)

    def _draw_some(self, local: Local, answers: Answering, places: Sequence[tuple[int, int]], generation: int) -> None:
        rollouts = [self._rollout(place, generation) for place in places]
        try:
            found = local.run(rollouts, self.progress, f"samples of {self.subject.name}", check=self.check)
        except BaseException:
            self._take_up()  # what has ended until now
            raise
        if self.judge is not None:
            self.progress.phase("judging")
            found = self.judge.judge(found)
        ids = {rollout.rollout_id: place for rollout, place in zip(rollouts, places, strict=True)}
        new = read_samples(self.store, ids, found, self.config.agents)
        self.samples |= {(sample.task, sample.sample): sample for sample in new}
        files.write_samples(self.folder, list(self.samples.values()))
        self._refuse_unheard(new, answers, local.runner.attached)

    def _refuse_unheard(self, samples: Sequence[Sample], answers: Answering, attached: Sequence[str]) -> None:
        """Refuse an evaluation in which something else was measured than what was named.

        Raises:
            LightningError: not one call reached what is evaluated.
        """
        seen = {name for sample in samples for name in sample.usage if name}
        if self.config.agents is not None and seen and not any(selects(self.config.agents, name) for name in seen):
            check_known(self.config.agents, seen)
        if answers.model is None or all(sample.status == "failed" for sample in samples):
            return
        calls = [usage for sample in samples for usage in sample.usage.values()]
        if not calls:
            raise LightningError(nothing_captured(len(samples), attached))
        elsewhere = sum(usage.elsewhere for usage in calls)
        made = sum(usage.calls for usage in calls)
        if made and elsewhere == made:
            raise LightningError(
                f"not one of {made} model calls reached {self.subject.name}: calls without an agent's name stay at"
                " their own endpoint. Make them inside `with lightning_spans.agent(...)`, or leave out --model and"
                " --endpoint to evaluate the program as it is."
            )
        if elsewhere:
            self.progress.note(
                f"{elsewhere} of {made} model calls went to their own endpoint, and not to {self.subject.name}:"
                " those of agents that are not named, or have no name"
            )

    def _take_up(self) -> int:
        """Take the samples that are in the store already, end what nobody waits for, and number what comes now."""
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
        for first in range(0, len(ended), _AT_ONCE):
            some = [o for o in outcomes(self.store, ended[first : first + _AT_ONCE]) if self._has_verdict(o)]
            for sample in read_samples(self.store, places, some, self.config.agents):
                if sample.status != "failed" and sample.sample < self.config.samples:
                    self.samples[sample.task, sample.sample] = sample
        if self.samples:
            files.write_samples(self.folder, list(self.samples.values()))
        return 1 + max(_generation(rollout.rollout_id) for rollout in old)

    def _has_verdict(self, outcome: Outcome) -> bool:
        """Whether a sample of before needs no judge, or has had its reward of one."""
        missing = self.judge is not None and outcome.attempt is not None and outcome.crash is None
        return not missing or any(reward.source == JUDGE for reward in outcome.rewards)

    def _group(self, task: int) -> str:
        return f"{self.name}:{task}"

    def _rollout(self, place: tuple[int, int], generation: int) -> Rollout:
        task, sample = place
        return Rollout(
            # seeds follow from what stands after the colon: the same for both sides, and for one that goes on
            rollout_id=f"{self.name}.{generation}:{task}-{sample}",
            group_id=self._group(task),
            task=self.tasks[task],
            mode="eval",
            max_attempts=self.config.max_attempts,
            timeout_s=self.config.timeout_s,
        )

    def _runner(self, work: int, logs: Path) -> Runner:
        config = self.config
        job = Job(target=config.target, command=config.command, reward=config.reward, work=config.work)
        workers = worker_count(config.workers, work, config.concurrency)
        return Runner(job, workers=workers, concurrency=config.concurrency, logs=logs)

    def _routing(self, answers: Answering) -> Routing:
        config = self.config
        if answers.model is None:
            return Routing()
        seed = 0 if config.seed is None and answers.engines else config.seed
        return Routing(
            agents=tuple(answers.policies.by_agent) or config.agents or ("*",),
            model=answers.model,
            policies=answers.policies,
            seed=seed,
            temperature=config.temperature,
            plain=config.sampling == "plain",
            max_tokens=config.max_tokens,
            unnamed=unnamed(config.command, config.agents, config.name_by),
            name_by=parse_rules(config.name_by),
        )


@contextmanager
def _started(runner: Runner) -> Iterator[None]:
    runner.start()
    try:
        yield
    finally:
        runner.stop()


def _place(rollout_id: str) -> tuple[int, int]:
    task, _, sample = rollout_id.rpartition(":")[2].partition("-")
    return int(task), int(sample)


def _together(places: Sequence[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Cut what is to be drawn into pieces; the samples of a task stay together, for a judge compares them."""
    piece: list[tuple[int, int]] = []
    for _, its in groupby(places, key=lambda place: place[0]):
        group = list(its)
        if piece and len(piece) + len(group) > _AT_ONCE:
            yield piece
            piece = []
        piece += group
    if piece:
        yield piece


def _generation(rollout_id: str) -> int:
    return int(rollout_id.rpartition(":")[0].rpartition(".")[2])
