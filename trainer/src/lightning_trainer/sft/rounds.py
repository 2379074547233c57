"""Rejection sampling: the program runs on the current weights, what earned most is learned, and again.

Each round begins with the weights that the last one left. A round's attempts are compared within their task; those that
earned no more than the worst of the round teach nothing, so that a policy which solves no task does not learn from its
failures.

After each round what going on exactly needs is kept (`_State`), until the last one is done.
"""

from __future__ import annotations

import json
import shutil
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from lightning_spans import hooks
from lightning_spans.errors import AgentFailedError, ConfigError, NothingToLearnError
from lightning_spans.schema.agents import earns
from lightning_spans.store import Store
from lightning_trainer import registry
from lightning_trainer.backends.protocol import Backend, Learner
from lightning_trainer.config.files import CONFIG_NAME
from lightning_trainer.config.workers import worker_count
from lightning_trainer.export.export import selected
from lightning_trainer.export.files import Line
from lightning_trainer.export.wanted import Wanted
from lightning_trainer.gateway.engine import tool_format
from lightning_trainer.gateway.prompt.template import check_calls
from lightning_trainer.gateway.settings import Routing
from lightning_trainer.judging.judge import CACHE_NAME, GroupJudge
from lightning_trainer.judging.options import read_judge
from lightning_trainer.models import look
from lightning_trainer.policies import parse
from lightning_trainer.report.agents import nothing_captured
from lightning_trainer.report.metrics import MetricLog, write_atomically
from lightning_trainer.report.progress import Progress, Silent
from lightning_trainer.rl.rollouts import Outcome, plan
from lightning_trainer.rl.rows import Row
from lightning_trainer.rl.scores import Score, score
from lightning_trainer.run.data import Task, digest, load_tasks
from lightning_trainer.run.folders import STORE_NAME, held, new_folder
from lightning_trainer.run.interrupts import Interrupted, deferred
from lightning_trainer.run.local import UNKNOWN_POLICY, Local, opened, serving, unnamed
from lightning_trainer.run.state import OPEN
from lightning_trainer.runner.runner import Runner
from lightning_trainer.runner.target import Job
from lightning_trainer.sft.batches import make_rows
from lightning_trainer.sft.config import OF_FILES, RoundsConfig
from lightning_trainer.sft.data import read_lines_of_store
from lightning_trainer.sft.fit import CHECKPOINT, Fit, Fitted, schedule
from lightning_trainer.sft.render import Renderer
from lightning_trainer.sft.sft import options_of, steps_of

STATE_NAME: Final = "rounds.json"  # in the run's folder, while rounds are to come
NOT_BETTER: Final = "earned no more than the worst of the round"


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What came of one round.

    Attributes:
        number: from 1.
        reward: mean of what was sampled, before the round's learning.
        rows: learned from.
        fitted: losses and steps.
        held_out: mean reward of the held-out tasks after it; None without such tasks.
        left_out: calls and conversations in no row, by reason.
    """

    number: int
    reward: float | None
    rows: int
    fitted: Fitted
    held_out: float | None = None
    left_out: dict[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return what the command prints of it."""
        return {
            "round": self.number, "reward": self.reward, "rows": self.rows, "steps": self.fitted.steps,
            "loss_before": self.fitted.before, "loss_after": self.fitted.after, "held_out": self.held_out,
            "left_out": self.left_out,
        }  # fmt: skip

    @classmethod
    def from_state(cls, values: Mapping[str, Any]) -> Round:
        """Read what `dataclasses.asdict` gave."""
        return cls(**{**values, "fitted": Fitted(**values["fitted"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class _State:
    """Where the rounds stand, as kept in the run's folder.

    Attributes:
        done: the rounds that are.
        before: mean reward of the held-out tasks before the first.
        data: fingerprint of the tasks.
        weights: folder beside it with weights and optimiser; "" before the first round is done.
    """

    data: str
    done: tuple[Round, ...] = ()
    before: float | None = None
    weights: str = ""

    @property
    def steps(self) -> int:
        """Steps taken."""
        return sum(each.fitted.steps for each in self.done)

    @classmethod
    def read(cls, folder: Path) -> _State:
        """Read it.

        Raises:
            ConfigError: there is none, or it can't be read.
        """
        try:
            values = json.loads((folder / STATE_NAME).read_text(encoding="utf-8"))
            return cls(**{**values, "done": tuple(Round.from_state(each) for each in values["done"])})
        except FileNotFoundError:
            raise ConfigError(
                f"{folder} has no rounds to go on with: none was done, or all were. Begin anew; from what all of them"
                f" made with --model {folder / CHECKPOINT}."
            ) from None
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"{folder / STATE_NAME} can't be read: {error!r}. Begin anew.") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """What came of all rounds.

    Attributes:
        rounds: those in which something was learned; at least one.
        folder: the run's.
        checkpoint: a model folder with the weights of the last one.
        before: mean reward of the held-out tasks before the first; None without such tasks.
    """

    rounds: tuple[Round, ...]
    folder: Path
    checkpoint: Path
    before: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return what the command prints."""
        first, last = self.rounds[0], self.rounds[-1]
        return {
            "loss_before": first.fitted.before, "loss_after": last.fitted.after, "checkpoint": str(self.checkpoint),
            "folder": str(self.folder), "reward_before": self.before, "reward_after": last.held_out,
            "rounds": [each.to_json() for each in self.rounds],
        }  # fmt: skip


def rejection_sampling(config: RoundsConfig, progress: Progress | None = None, *, resume: Path | None = None) -> Rounds:
    """Sample, keep the best, learn, and again.

    Args:
        config: on what, and how; of rounds that go on, what `resumed` returned.
        progress: told what happens; by default nobody is.
        resume: folder of rounds to go on with, after the last one that was done.

    Raises:
        LightningError: an option, a file or the agent is wrong, or the first round has nothing to learn. No folder is
            left then.
        Interrupted: somebody asked to stop; what was learned is saved.
    """
    progress = progress or Silent()
    hooks.load_all()
    backend: Backend = registry.by_name("backend", config.backend)
    look(config.model)  # or refuse
    tasks, val = load_tasks(config.tasks), load_tasks(config.val) if config.val else []
    judging = read_judge(config.reward, config.judge)
    state = _State(data=digest([*tasks, *val])) if resume is None else _resumable(resume, digest([*tasks, *val]))
    with ExitStack() as stack:
        check = stack.enter_context(deferred(progress.stopping))
        folder = stack.enter_context(new_folder(config.out) if resume is None else _again(resume))
        runner = stack.enter_context(_started(config, folder, len(tasks), progress))
        check()
        store = stack.enter_context(opened(str(folder / STORE_NAME)))
        store.cancel([r.rollout_id for status in OPEN for r in store.rollouts(status=status)])  # of an earlier life
        judge = None
        if judging is not None:
            judge = stack.enter_context(
                closing(GroupJudge(judging, store, seed=config.seed, cache=folder / CACHE_NAME))
            )
        progress.phase(f"loading {config.model}")
        learner = stack.enter_context(closing(backend.learner(config.model, _options(config, len(tasks)))))
        check_calls(learner.engine.tokenizer, tool_format(learner.engine))
        if state.weights:
            learner.load(folder / state.weights)
        log = stack.enter_context(closing(MetricLog(folder, from_step=state.steps)))
        routing = _routing(config, learner.engine.model)
        local = stack.enter_context(serving(store, runner, routing=routing, engine=learner.engines))
        loop = _RoundLoop(
            config=config, tasks=tasks, val=val, folder=folder, store=store, local=local, learner=learner, judge=judge,
            log=log, progress=progress, check=check, state=state, steps=state.steps,
        )  # fmt: skip
        try:
            return loop.run()
        except Interrupted:
            saved = (folder / CHECKPOINT).exists()
            what = f"what was learned is in {folder / CHECKPOINT}" if saved else "before anything was learned"
            done = (folder / STATE_NAME).exists()
            then = f". Go on after the last round with: lightning-rl sft --resume {folder}" if done else ""
            raise Interrupted(f"stopped: {what}{then}") from None


def resumed(folder: Path) -> RoundsConfig:
    """Return the options of rounds that go on.

    Raises:
        ConfigError: there are none.
    """
    _State.read(folder)  # or refuse
    try:
        values = json.loads((folder / CONFIG_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder / CONFIG_NAME} can't be read: {error}. Begin anew.") from None
    own = {name: value for name, value in values.items() if value is not None and name not in OF_FILES}
    return RoundsConfig(**{**own, "out": None})


def _resumable(folder: Path, data: str) -> _State:
    state = _State.read(folder)
    if state.data != data:
        raise ConfigError(f"the tasks have changed since {folder} began. Begin anew, in another folder.")
    return state


@contextmanager
def _again(folder: Path) -> Iterator[Path]:
    with held(folder):
        yield folder


@contextmanager
def _started(config: RoundsConfig, folder: Path, tasks: int, progress: Progress) -> Iterator[Runner]:
    progress.phase("importing the agent")
    job = Job(target=config.target, command=config.command, reward=config.reward)
    workers = worker_count(config.workers, tasks * config.samples, config.concurrency)
    runner = Runner(job, workers=workers, concurrency=config.concurrency, logs=folder / "logs")
    runner.start()
    try:
        yield runner
    finally:
        runner.stop()


def _options(config: RoundsConfig, tasks: int) -> dict[str, object]:
    """Return the learner's options. How many steps are to come is not known, so the learning rate rises and stays."""
    steps = config.rounds * (config.steps or max(1, tasks * config.kept // config.batch_size))
    return {"warmup_steps": schedule(steps)[0], **options_of(config)}


def _routing(config: RoundsConfig, model: str) -> Routing:
    own = parse(config.policies)
    return Routing(
        agents=tuple(own.by_agent) or config.agents or ("*",),
        model=UNKNOWN_POLICY if own.by_agent else model,
        policies=own,
        seed=config.seed,
        temperature=config.temperature,
        plain=True,
        max_tokens=config.answer_tokens,
        unnamed=unnamed(config.command, config.agents),
    )


@dataclass(kw_only=True)
class _RoundLoop:
    """Takes the rounds."""

    config: RoundsConfig
    tasks: Sequence[Task]
    val: Sequence[Task]
    folder: Path
    store: Store
    local: Local
    learner: Learner
    judge: GroupJudge | None
    log: MetricLog
    progress: Progress
    check: Callable[[], None]
    name: str = field(default_factory=lambda: f"rounds-{uuid.uuid4().hex[:8]}")  # unique in the store
    state: _State
    steps: int = 0

    def run(self) -> Rounds:
        """Take the rounds that are to come; one in which nothing is better than the rest is the last."""
        done = list(self.state.done)
        before = self.state.before if done else self._held_out(0)
        for number in range(len(done) + 1, self.config.rounds + 1):
            try:
                done.append(self._round(number))
                if number < self.config.rounds:
                    self._keep(replace(self.state, done=tuple(done), before=before, weights=f"{CHECKPOINT}-{number}"))
            except NothingToLearnError as error:
                if not done:
                    raise
                self.progress.note(f"there is no round {number}: {str(error).splitlines()[0]}")
                break
        self._forget()
        return Rounds(rounds=tuple(done), folder=self.folder, checkpoint=self.folder / CHECKPOINT, before=before)

    def _keep(self, state: _State) -> None:
        """Keep what going on exactly needs; what a round before kept goes."""
        self.progress.phase("saving")
        self.learner.save(self.folder / state.weights)
        text = json.dumps(asdict(state), indent=2) + "\n"
        write_atomically(self.folder / STATE_NAME, text.encode())
        if self.state.weights:
            shutil.rmtree(self.folder / self.state.weights)
        self.state = state

    def _forget(self) -> None:
        (self.folder / STATE_NAME).unlink(missing_ok=True)
        if self.state.weights:
            shutil.rmtree(self.folder / self.state.weights, ignore_errors=True)

    def _round(self, number: int) -> Round:
        name, size = f"{self.name}:t{number}", self.config.samples
        outcomes = self._sample(self.tasks, name, size, f"samples of round {number}")
        found = score(outcomes, "lowest")
        self.log.add("train", self.steps, {**found.metrics(), "round": float(number)})
        self.progress.note(f"round {number}: {_told(found)}")
        rows, left_out = self._best(outcomes)
        fitted = self._learn(rows)
        self.steps += fitted.steps
        after = self._held_out(number)
        return Round(
            number=number, reward=found.reward, rows=len(rows), fitted=fitted, held_out=after, left_out=dict(left_out)
        )

    def _sample(self, tasks: Sequence[Task], name: str, size: int, what: str, mode: str = "train") -> list[Outcome]:
        config = self.config
        rollouts = plan(
            tasks, name=name, size=size, mode=mode, max_attempts=config.max_attempts, timeout_s=config.timeout_s
        )  # fmt: skip
        outcomes = self.local.run(rollouts, self.progress, what, check=self.check)
        if self.judge is not None:
            self.progress.phase("judging")
            outcomes = self.judge.judge(outcomes)
        if all(outcome.attempt is None for outcome in outcomes):
            error = "\n".join((outcomes[-1].error or "").splitlines()[-12:])
            raise AgentFailedError(
                f"all {len(outcomes)} {what} failed. The last error:\n{error}\n"
                "Run the agent by itself on one task, to see what is wrong."
            )
        return outcomes

    def _held_out(self, number: int) -> float | None:
        """Run the held-out tasks, with the same seeds each time."""
        if not self.val:
            return None
        name = f"{self.name}.{number}:v"  # seeds follow from what stands after the colon
        outcomes = self._sample(self.val, name, self.config.val_samples, "held-out tasks", "val")
        found = score(outcomes, "lowest")
        self.log.add("val", self.steps, found.metrics())
        self.progress.note(f"held out after {number} rounds: {_told(found)}")
        return found.reward

    def _best(self, outcomes: Sequence[Outcome]) -> tuple[list[Row], Counter[str]]:
        """Return rows of what earned most.

        Raises:
            NothingToLearnError: no attempt earned more than another.
        """
        config = self.config
        ids = tuple(outcome.rollout.rollout_id for outcome in outcomes)
        wanted = Wanted(
            format="sft", agents=config.agents, min_reward=config.min_reward, best=config.kept, rollout_ids=ids
        )
        with selected(self.store, wanted) as chosen:
            lines, left_out = list(chosen.training()), Counter(chosen.left_out)
        if not lines and not left_out:
            raise AgentFailedError(nothing_captured(len(outcomes), self.local.runner.attached))
        if config.min_reward is None:
            better = [line for line in lines if _is_better(line, outcomes)]
            left_out += Counter({NOT_BETTER: len(lines) - len(better)})
            lines = better
        if not lines:
            raise NothingToLearnError(_nothing(score(outcomes, "lowest"), left_out))
        made = make_rows(
            read_lines_of_store(lines, "the round's samples"),
            Renderer(self.learner.engine.tokenizer, self.learner.end_tokens),
            agents=config.agents,
            policies=parse(config.policies),
            max_tokens=min(config.max_tokens or self.learner.engine.max_model_len, self.learner.engine.max_model_len),
        )
        return made.rows, left_out + made.left_out

    def _learn(self, rows: list[Row]) -> Fitted:
        config = self.config
        if not (self.folder / CONFIG_NAME).exists():  # from here on the folder stays
            write_atomically(self.folder / CONFIG_NAME, (config.model_dump_json(indent=2) + "\n").encode())
        return Fit(
            learner=self.learner, rows=rows, held_out=(), folder=self.folder, log=self.log, progress=self.progress,
            check=self.check, batch_size=config.batch_size, steps=steps_of(config, rows), seed=config.seed,
            from_step=self.steps,
        ).run()  # fmt: skip


def _is_better(line: Line, outcomes: Sequence[Outcome]) -> bool:
    """Whether an agent earned more in an attempt than in the worst of the round."""
    earned = [
        sum(reward.value for reward in outcome.rewards if earns(reward.agent, line.get("agent_path") or line["agent"]))
        for outcome in outcomes
        if outcome.attempt is not None and outcome.unjudged is None
    ]
    return line["reward"] is not None and line["reward"] > min(earned)


def _told(found: Score) -> str:
    reward = "no reward" if found.reward is None else f"mean reward {found.reward:.3f}"
    return f"{reward} of {found.rollouts} samples, {found.failed} failed"


def _nothing(found: Score, left_out: Counter[str]) -> str:
    why = "\n".join(f"  {count}: {reason}" for reason, count in left_out.most_common() if count)
    return (
        f"nothing of the round's samples is worth learning ({_told(found)}).\n{why}\n"
        "Give tasks that the agent solves sometimes, more --samples, or a reward with more steps between bad and good."
        " Where it never succeeds, begin with what others said: lightning-rl sft DATA."
    )
