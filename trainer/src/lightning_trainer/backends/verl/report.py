"""Reports of verl's steps, in the run's own log and on the screen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from lightning_trainer.config.train import TrainConfig
from lightning_trainer.reasons.amounts import amount
from lightning_trainer.report.agents import unheard_warning
from lightning_trainer.report.log.lines import WAITED_FOR
from lightning_trainer.report.metrics import Kind, MetricLog
from lightning_trainer.report.progress import ON_VERL, Progress
from lightning_trainer.report.speed.waits import longest_wait, name_bottleneck
from lightning_trainer.report.step_notes import UNREWARDED, score_line, unrewarded_note
from lightning_trainer.rl.scores import BY_AGENT, BY_TASK, Score

# verl's name of a number, and the name in the torch backend.
_NAMES: Final = {
    "actor/pg_loss": "loss",
    "actor/grad_norm": "grad_norm",
    "actor/pg_clipfrac": "clip_fraction",
    "actor/kl_loss": "kl",
    "actor/entropy": "entropy",
    "perf/mfu/actor": "mfu",
    "actor/perf/max_memory_allocated_gb": "gpu_memory_bytes",
    "actor/perf/cpu_memory_used_gb": "memory_bytes",
    "timing_s/step": "seconds",
    "timing_s/gen": "rollout_seconds",
    "timing_s/old_log_prob": "logprob_seconds",
    "timing_s/update_actor": "update_seconds",
    "timing_s/update_weights": "weights_seconds",
    "timing_s/save_checkpoint": "save_seconds",
}
_GIB: Final = ("gpu_memory_bytes", "memory_bytes")  # which verl reports in GiB
_OURS: Final = "lightning/"
_SPOKE: Final = "calls_per_rollout/"


class Reporter:
    """Records the numbers of steps.

    Args:
        log: of the run.
        progress: shown to people.
        config: of the run.
    """

    def __init__(self, log: MetricLog, progress: Progress, config: TrainConfig) -> None:
        self._log = log
        self._progress = progress
        self._config = config
        self._steps: list[Mapping[str, float]] = []  # since the run started or was resumed
        self._unrewarded: set[str] = set()  # agents of which the user was warned

    def told(
        self,
        kind: Kind,
        step: int,
        values: Mapping[str, float],
        by_task: Mapping[str, Mapping[str, float]] | None = None,
    ) -> None:
        """Record the numbers of a step, or of a validation.

        Args:
            kind: of the numbers.
            step: verl's number: of the step, from 1, or of the steps taken before a validation.
            values: by verl's names.
            by_task: of a validation: the score by task.
        """
        if kind == "val":
            self._log.add("val", step, values, {BY_TASK: by_task or {}})
            self._progress.alarms([alarm.text for alarm in self._log.alarms])
            self._progress.note(f"held out after {amount(step, 'step')}: {score_line(Score.from_metrics(values))}")
            self._progress.phase(ON_VERL)
            return
        numbers = ours(values, cpu=self._config.device == "cpu")
        self._warn_of_unrewarded(numbers)
        longest = longest_wait(numbers)
        self._log.add("train", step - 1, numbers, {WAITED_FOR: longest[0]} if longest is not None else {})
        self._progress.step(step - 1, numbers)
        self._progress.phase(ON_VERL)
        self._progress.alarms([alarm.text for alarm in self._log.alarms])
        self._steps.append(numbers)
        bottleneck = name_bottleneck(self._steps, self._config, samples_apart=False)  # vLLM sleeps during an update
        if bottleneck is not None:
            self._progress.note(bottleneck)
        if step == 1:
            self.warn_of_unheard(1)

    def _warn_of_unrewarded(self, numbers: dict[str, float]) -> None:
        """Warn once of each selected agent whose calls get no reward, and take its mark out of the numbers."""
        marks = [name for name in numbers if name.startswith(UNREWARDED)]
        new = {mark.removeprefix(UNREWARDED) for mark in marks if numbers.pop(mark)} - self._unrewarded
        if new:
            named = [name.removeprefix(BY_AGENT) for name in numbers if name.startswith(BY_AGENT)]
            self._progress.note(unrewarded_note(sorted(new), sorted(named)))
            self._unrewarded |= new

    def warn_of_unheard(self, steps: int) -> None:
        """Warn of agents that should be trained but have made no call so far."""
        names = [name for line in self._log.lines("train") for name in line]
        text = unheard_warning(
            self._config.agents or (), (n.removeprefix(_SPOKE) for n in names if n.startswith(_SPOKE)), steps
        )
        if text is not None:
            self._progress.note(text)


def ours(values: Mapping[str, float], *, cpu: bool = False) -> dict[str, float]:
    """Return numbers by our names: those that both backends have, our own, and verl's others under ``verl/``.

    Args:
        values: by verl's names.
        cpu: whether the learner is on a CPU, where verl's GPU memory is the memory of its process.
    """
    named = {
        _NAMES.get(name, name.removeprefix(_OURS) if name.startswith(_OURS) else f"verl/{name}"): value
        for name, value in values.items()
    }
    named |= {name: named[name] * 1024**3 for name in _GIB if name in named}
    if cpu and "gpu_memory_bytes" in named:
        named["memory_bytes"] = named.pop("gpu_memory_bytes")
    if not named.get("mfu"):  # verl does not know the speed of the device
        named.pop("mfu", None)
    return named
