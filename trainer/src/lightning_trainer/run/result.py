"""The result of a run, read from its log."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_trainer.backend_protocol import OpenRun
from lightning_trainer.intervals import Estimate
from lightning_trainer.models import BEST, NEWEST
from lightning_trainer.reasons.amounts import amount
from lightning_trainer.report.alarms import Alarm
from lightning_trainer.report.metrics import best_step
from lightning_trainer.report.step_notes import held_out_sentence
from lightning_trainer.rl.scores import Score, difference
from lightning_trainer.run.cliffs import ROLLBACK, PolicyReturn


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The results of a run.

    Attributes:
        before: held-out score before training; None without held-out tasks, or where these came later.
        after: held-out score after it.
        curve: mean training reward of each step; None where no rollout counted.
        steps: steps taken.
        checkpoint: the newest checkpoint, which `lightning-rl serve` takes; None where nothing was learned.
        folder: the run's.
        seconds: time that the run took, earlier parts of a resumed run included.
        alarms: every alarm of the run, in the order in which they were raised.
        rollbacks: every return of a policy to its best weights, in order.
        first: score of the first step's rollouts.
        last: likewise of the last step's.
        best: the checkpoint with the highest held-out reward, which `lightning-rl serve RUN` takes; None where that was
            highest before training, or is not known.
        best_step: steps after which the held-out reward was highest; None without held-out tasks, and with a judge.
    """

    before: Score | None
    after: Score | None
    curve: tuple[float | None, ...]
    steps: int
    checkpoint: Path | None
    folder: Path
    seconds: float
    alarms: tuple[Alarm, ...] = ()
    rollbacks: tuple[PolicyReturn, ...] = ()
    first: Score | None = None
    last: Score | None = None
    best: Path | None = None
    best_step: int | None = None

    @property
    def reward_before(self) -> float | None:
        """Mean held-out reward before training; without held-out tasks, of the first step's rollouts.

        None where the held-out tasks came later, with `resume`.
        """
        if self._held_out:
            return self.before.reward if self.before else None
        return self.curve[0] if self.curve else None

    @property
    def reward_after(self) -> float | None:
        """Mean held-out reward after training; without held-out tasks, of the last step's rollouts.

        None where that is the first step, whose rollouts were sampled before anything was learned.
        """
        if self._held_out:
            return self.after.reward if self.after else None
        return self.curve[-1] if len(self.curve) > 1 else None

    @property
    def _held_out(self) -> bool:
        return self.before is not None or self.after is not None

    def by_agent(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return the rewards by agent before and after, if rewards were given by agent."""
        before, after = self._sides()
        return dict(before.by_agent) if before else {}, dict(after.by_agent) if after else {}

    def differences(self) -> dict[str, tuple[Estimate, int]]:
        """Return how far held-out rewards rose, paired by task, and on how many tasks.

        Of the reward under "", and of each agent with its own rewards. {} without held-out tasks before and after.
        """
        if self.before is None or self.after is None:
            return {}
        names = [name for name in self.after.by_task if name in self.before.by_task]
        return {name: difference(self.after, self.before, name) for name in names}

    def sentence(self) -> str | None:
        """Return a sentence on the change of the held-out reward; None if it was not measured twice."""
        if self.before is None or self.after is None:
            return None
        rise, tasks = self.differences().get("", (Estimate(None), 0))
        return held_out_sentence(self.before, self.after, rise, tasks)

    def returned_last(self) -> list[str]:
        """Return a sentence for each policy that the last validation returned to earlier weights."""
        return [
            f"{its.policy} fell in the last validation: the checkpoint has its weights after"
            f" {amount(its.to_step, 'step')}, and the reward after training is that of the weights before the return."
            for its in self.rollbacks
            if its.after_steps == self.steps
        ]

    def _sides(self) -> tuple[Score | None, Score | None]:
        if self._held_out:
            return self.before, self.after
        return self.first, self.last if self.steps > 1 else None

    def scores(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what the rewards before and after are: of what, of how many, and their uncertainty."""
        if self._held_out:
            came = "nothing, because these held-out tasks, or --val-samples, were added after training had started"
            said = "held-out tasks, before training" if self.before else came, "held-out tasks, after training"
        else:
            last = f"rollouts of step {self.steps}, on its training tasks, sampled before that step was learned from"
            none = "nothing, because no rollout was sampled after the only step. Give held-out tasks with --val"
            said = "rollouts of the first step, on training tasks", last if self.steps > 1 else none
        before, after = (_score_fields(of, found) for of, found in zip(said, self._sides(), strict=True))
        return before, after


def _score_fields(of: str, found: Score | None) -> dict[str, Any]:
    if found is None:
        return {"of": of, "mean": None}
    interval = {"low": found.low, "high": found.high}
    return {"of": of, "mean": found.reward, **interval, "tasks": found.tasks, "rollouts": found.rollouts}


def result_of(run: OpenRun, steps: int, seconds: float) -> Result:
    """Read a run's result from its log.

    Args:
        run: its steps have been taken.
        steps: how many, in total.
        seconds: duration of its last part.
    """
    declared = run.config.declared
    scores = {line["step"]: Score.from_metrics(line, declared) for line in run.log.validations()}
    rewards = dict(run.log.series("train", "reward"))
    steps_scores = {
        line["step"]: Score.from_metrics(line, declared) for line in run.log.lines("train") if "rollouts" in line
    }
    newest, best = run.folder / NEWEST, run.folder / BEST
    return Result(
        before=scores.get(0),
        after=scores.get(steps),
        curve=tuple(rewards.get(step) for step in range(steps)),
        steps=steps,
        checkpoint=newest if newest.exists() else None,
        folder=run.folder,
        seconds=run.start.seconds + seconds,
        alarms=tuple(run.log.raised()),
        rollbacks=tuple(PolicyReturn.from_line(line) for line in run.log.lines(ROLLBACK)),
        first=steps_scores.get(0),
        last=steps_scores.get(steps - 1),
        best=best if best.exists() else None,
        best_step=best_step(run.log.validations()),
    )
