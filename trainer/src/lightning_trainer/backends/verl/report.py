"""What verl tells of its steps, in the run's own log and on the screen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from lightning_trainer.reasons.amounts import amount
from lightning_trainer.report.agents import not_heard
from lightning_trainer.report.metrics import Kind, MetricLog
from lightning_trainer.report.progress import Progress
from lightning_trainer.report.step_notes import score_line
from lightning_trainer.rl.scores import BY_TASK, Score

# verl's name of a number, and the name that the torch backend gives it.
_NAMES: Final = {
    "actor/pg_loss": "loss",
    "actor/grad_norm": "grad_norm",
    "actor/pg_clipfrac": "clip_fraction",
    "actor/kl_loss": "kl",
    "actor/entropy": "entropy",
    "perf/mfu/actor": "mfu",
    "timing_s/step": "seconds",
    "timing_s/gen": "rollout_seconds",
    "timing_s/old_log_prob": "logprob_seconds",
    "timing_s/update_actor": "update_seconds",
    "timing_s/update_weights": "weights_seconds",
    "timing_s/save_checkpoint": "save_seconds",
}
_OURS: Final = "lightning/"
_SPOKE: Final = "calls_per_rollout/"


class Reporter:
    """Keeps the numbers of steps.

    Args:
        log: of the run.
        progress: shown to people.
        agents: names and globs of the agents to train; None: all.
    """

    def __init__(self, log: MetricLog, progress: Progress, agents: Sequence[str] | None = None) -> None:
        self._log = log
        self._progress = progress
        self._agents = agents or ()

    def told(
        self,
        kind: Kind,
        step: int,
        values: Mapping[str, float],
        by_task: Mapping[str, Mapping[str, float]] | None = None,
    ) -> None:
        """Hear the numbers of a step, or of a validation.

        Args:
            kind: of what.
            step: verl's number: of the step, from 1, or of the steps taken before a validation.
            values: by verl's names.
            by_task: of a validation: the score's.
        """
        if kind == "val":
            self._log.add("val", step, values, {BY_TASK: by_task or {}})
            self._progress.alarms([alarm.text for alarm in self._log.alarms])
            self._progress.note(f"held out after {amount(step, 'step')}: {score_line(Score.from_metrics(values))}")
            return
        numbers = ours(values)
        self._log.add("train", step - 1, numbers)
        self._progress.step(step - 1, numbers)
        self._progress.alarms([alarm.text for alarm in self._log.alarms])
        if step == 1:
            self.warn_of_unheard(1)

    def warn_of_unheard(self, steps: int) -> None:
        """Warn of agents that are to be trained and made no call so far."""
        names = [name for line in self._log.lines("train") for name in line]
        text = not_heard(self._agents, (n.removeprefix(_SPOKE) for n in names if n.startswith(_SPOKE)), steps)
        if text is not None:
            self._progress.note(text)


def ours(values: Mapping[str, float]) -> dict[str, float]:
    """Return numbers by our names: those that both backends have, our own, and verl's others under ``verl/``."""
    return {
        _NAMES.get(name, name.removeprefix(_OURS) if name.startswith(_OURS) else f"verl/{name}"): value
        for name, value in values.items()
    }
