"""The loop over rounds: sample on the current weights, learn the best attempts, and repeat."""

from __future__ import annotations

import json
import math
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Final

from lightning_spans.errors import AgentFailedError, DataError, NothingToLearnError, UnknownAgentError
from lightning_spans.schema.agents import earns
from lightning_trainer.backend_protocol import Learner
from lightning_trainer.config.files import CONFIG_NAME, to_json
from lightning_trainer.judges import RolloutJudge
from lightning_trainer.kits.export.export import open_selection
from lightning_trainer.kits.export.files import Line
from lightning_trainer.kits.export.wanted import ExportSelection
from lightning_trainer.kits.sft.batches import make_rows
from lightning_trainer.kits.sft.config import RoundsConfig
from lightning_trainer.kits.sft.data import read_lines_of_store
from lightning_trainer.kits.sft.fit import Fit, FitResult
from lightning_trainer.kits.sft.lineage import LineageWriter
from lightning_trainer.kits.sft.reasons import UnlearnedReason
from lightning_trainer.kits.sft.render import Renderer
from lightning_trainer.kits.sft.resume import CHECKPOINT, forget, keep
from lightning_trainer.kits.sft.rounds.state import RESULT_NAME, STATE_NAME, Round, Rounds, RoundsState
from lightning_trainer.kits.sft.sft import steps_of
from lightning_trainer.policies import parse
from lightning_trainer.report.agents import explain_no_calls
from lightning_trainer.report.failures import advice
from lightning_trainer.report.metrics import MetricLog, write_atomically
from lightning_trainer.report.progress import Progress
from lightning_trainer.report.terminal import decimal
from lightning_trainer.rl.rollouts import Failed, Outcome, plan
from lightning_trainer.rl.rows import Row
from lightning_trainer.rl.scores import BY_TASK, Score, reward_of_failures, score
from lightning_trainer.run.data import Task
from lightning_trainer.session.session import Session

_LEAST_STEPS: Final = 10  # of a round
_MOST_EPOCHS: Final = 8.0  # for that


@dataclass(kw_only=True)
class RoundLoop:
    """Runs the rounds.

    Attributes:
        began: monotonic time at which the rounds would have begun without an interruption.
    """

    config: RoundsConfig
    tasks: Sequence[Task]
    val: Sequence[Task]
    folder: Path
    session: Session
    learner: Learner
    judge: RolloutJudge | None
    log: MetricLog
    progress: Progress
    check: Callable[[], None]
    name: str = field(default_factory=lambda: f"rounds-{uuid.uuid4().hex[:8]}")  # unique in the store
    state: RoundsState
    lineage: LineageWriter
    steps: int = 0
    began: float = field(default_factory=time.monotonic)

    def run(self) -> Rounds:
        """Run the remaining rounds. A round in which no attempt is better than the others ends them."""
        done = list(self.state.done)
        before = self.state.before if done else self._held_out(0)
        for number in range(len(done) + 1, self.config.rounds + 1):
            try:
                done.append(self._round(number))
                if number < self.config.rounds:
                    self._keep(replace(self.state, done=tuple(done), before=before))
            except NothingToLearnError as error:
                if not done:
                    raise
                self.progress.note(f"there is no round {number}: {str(error).splitlines()[0]}")
                break
        rounds = Rounds(
            rounds=tuple(done), folder=self.folder, checkpoint=self.folder / CHECKPOINT, before=before,
            seconds=self._seconds,
        )  # fmt: skip
        write_atomically(self.folder / RESULT_NAME, (json.dumps(rounds.to_json(), indent=2) + "\n").encode())
        forget(self.folder, STATE_NAME)
        return rounds

    @property
    def _seconds(self) -> float:
        return time.monotonic() - self.began

    def _keep(self, state: RoundsState) -> None:
        """Save the state for an exact resume, and remove that of the round before."""
        self.progress.phase("saving")
        values = asdict(replace(state, seconds=self._seconds))
        self.state = replace(state, weights=keep(self.folder, STATE_NAME, values, self.learner, self.state.weights))

    def _round(self, number: int) -> Round:
        name, size = f"{self.name}:t{number}", self.config.samples
        outcomes = self._sample(self.tasks, name, size, f"samples of round {number}")
        found = score(outcomes, self.config.failed, self.config.agents, self.config.declared)
        self.log.add("train", self.steps, {**found.metrics(), "round": float(number)})
        self.progress.note(f"round {number}: {_describe_score(found)}")
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
        outcomes = self.session.run(rollouts, self.progress, what, check=self.check)
        if self.judge is not None:
            self.progress.phase("judging")
            outcomes = self.judge.judge(outcomes)
        if all(outcome.attempt is None for outcome in outcomes):
            error = "\n".join((outcomes[-1].error or "").splitlines()[-12:])
            raise AgentFailedError(
                f"all {len(outcomes)} {what} failed. The last error:\n{error}\n"
                f"{advice([outcome.error or '' for outcome in outcomes])}"
            )
        return outcomes

    def _held_out(self, number: int) -> float | None:
        """Run the held-out tasks, with the same seeds each time, and return the mean reward."""
        if not self.val:
            return None
        name = f"{self.name}.{number}:v"  # seeds depend on what follows the colon
        outcomes = self._sample(self.val, name, self.config.val_samples, "held-out tasks", "val")
        found = score(outcomes, self.config.failed, self.config.agents, self.config.declared)
        self.log.add("val", self.steps, found.metrics(), {BY_TASK: found.by_task if self.judge is None else {}})
        self.progress.note(f"held out after {number} rounds: {_describe_score(found)}")
        return found.reward

    def _best(self, outcomes: Sequence[Outcome]) -> tuple[list[Row], Counter[str]]:
        """Return rows of the best attempts.

        Raises:
            NothingToLearnError: no attempt earned more than another.
        """
        config = self.config
        lines, left_out = self._lines(tuple(outcome.rollout.rollout_id for outcome in outcomes))
        if not lines and not left_out:
            raise AgentFailedError(explain_no_calls(len(outcomes), self.session.runner.attached, config.command))
        if config.min_reward is None:
            better = [line for line in lines if _is_better(line, outcomes, config.failed)]
            left_out += Counter({UnlearnedReason.NOT_BETTER: len(lines) - len(better)})
            lines = better
        if not lines:
            raise NothingToLearnError(_nothing(score(outcomes, config.failed), left_out))
        examples = read_lines_of_store(lines, "the round's samples")
        self.lineage.learning_from(examples)
        limit = self.learner.engine.max_model_len
        try:
            made = make_rows(
                examples,
                Renderer.of(self.learner),
                agents=config.agents,
                policies=parse(config.policies),
                max_length=min(config.max_length or limit, limit),
            )
        except DataError as error:  # without anything to learn, the rounds end; what was learned before is kept
            raise NothingToLearnError(str(error)) from None
        return made.rows, left_out + made.left_out

    def _lines(self, rollout_ids: tuple[str, ...]) -> tuple[list[Line], Counter[str]]:
        """Read the best attempts, and count what is left out.

        Raises:
            NothingToLearnError: none of the agents made a call, although they did in earlier rounds.
            UnknownAgentError: none of the agents made a call in the first round.
        """
        config = self.config
        wanted = ExportSelection(
            format="sft", agents=config.agents, min_reward=config.min_reward, best=config.kept,
            rollout_ids=rollout_ids, some_silent=True,
        )  # fmt: skip
        try:
            with open_selection(self.session.store, wanted) as chosen:
                return list(chosen.training()), Counter(chosen.left_out)
        except UnknownAgentError as error:
            if not self.steps:
                raise
            raise NothingToLearnError(f"in its samples, {error}") from None

    def _learn(self, rows: list[Row]) -> FitResult:
        config = self.config
        if not (self.folder / CONFIG_NAME).exists():  # from here on, the folder is kept
            write_atomically(self.folder / CONFIG_NAME, to_json(config).encode())
        return Fit(
            learner=self.learner, rows=rows, held_out=(), folder=self.folder, log=self.log, progress=self.progress,
            check=self.check, batch_size=config.batch_size, group_by_prefix=config.group_by_prefix,
            steps=round_steps(config, len(rows)), seed=config.seed, from_step=self.steps, lineage=self.lineage,
        ).run()  # fmt: skip


def round_steps(config: RoundsConfig, rows: int) -> int:
    """Return the number of steps of a round: if no length is given, at least ten, unless that is over eight epochs.

    A round often keeps few rollouts, and two epochs of 16 of them are two steps, from which nothing is learned.
    """
    steps = steps_of(config, rows)
    if config.steps or config.epochs:
        return steps
    return max(steps, min(_LEAST_STEPS, math.ceil(_MOST_EPOCHS * rows / config.batch_size)))


def _path_of(line: Line) -> str:
    path: str = line.get("agent_path") or line["agent"]
    return path


def _is_better(line: Line, outcomes: Sequence[Outcome], failed: Failed) -> bool:
    """Whether an agent earned more in an attempt than in the worst of the round, which may be a failed one."""
    crashed = reward_of_failures(outcomes, failed)
    earned = [
        crashed
        if counted is outcome.crash
        else sum(reward.value for reward in outcome.rewards if earns(reward.agent, _path_of(line)))
        for outcome in outcomes
        if (counted := outcome.counts(failed)) is not None
    ]
    return line["reward"] is not None and line["reward"] > min(earned)


def _describe_score(found: Score) -> str:
    reward = "no reward" if found.reward is None else f"mean reward {decimal(found.reward)}"
    return f"{reward} of {found.rollouts} samples, {found.failed} failed"


def _nothing(found: Score, left_out: Counter[str]) -> str:
    why = "\n".join(f"  {count}: {reason}" for reason, count in left_out.most_common() if count)
    return (
        f"no sample of this round is worth learning ({_describe_score(found)}).\n{why}\n"
        "Give tasks that the agent solves sometimes, more --samples, or a reward with more steps between bad and good."
        " If it never succeeds, train it on conversations first: lightning-rl sft DATA."
    )
