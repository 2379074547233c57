"""The teacher as a callback of a run: it gives a step's rows what is learned from it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from lightning_spans.record.stalls import waiting
from lightning_trainer.callbacks import Callback, CallbackContext, CallbackKind, StepRollouts
from lightning_trainer.choices import SELF
from lightning_trainer.kits.teaching.options import read_self
from lightning_trainer.kits.teaching.teacher import Tutor, open_tutor
from lightning_trainer.rl.algorithms.distil import at_endpoint

if TYPE_CHECKING:
    from lightning_trainer.config.train import TrainConfig
    from lightning_trainer.report.progress import Progress
    from lightning_trainer.rl.batch.batch import Batch


class TeacherKind(CallbackKind):
    """Takes part in runs that name a teacher."""

    def wanted(self, config: TrainConfig) -> bool:
        """Whether a teacher is named."""
        return config.teacher is not None

    def check(self, config: TrainConfig) -> None:
        """Reject wrong options of the self-teacher."""
        if config.teacher == SELF:
            read_self(config)

    def learner_options(self, config: TrainConfig) -> Mapping[str, Any]:
        """Return the divergence that the update minimises, and the weights of the self-teacher."""
        if config.teacher != SELF:
            return {}
        options = read_self(config)
        weights = {"teacher_weights": options.weights, "ema_decay": options.ema_decay}
        return {"divergence": options.divergence, **(weights if options.weights != "newest" else {})}

    def open(self, context: CallbackContext) -> AbstractContextManager[Callback]:
        """Open the teacher that the configuration names."""
        return _open(context)


class TeacherCallback(Callback):
    """Calls the teacher on the rows of each step.

    Args:
        tutor: adds what is learned to the rows.
        name: of the teacher, for people.
        progress: callback for progress events.
    """

    def __init__(self, tutor: Tutor, name: str, progress: Progress) -> None:
        self._tutor, self._name, self._progress = tutor, name, progress

    def after_batch(self, batch: Batch, rollouts: StepRollouts) -> tuple[Batch, Mapping[str, float]]:
        """Add the teacher's advantages or targets to a batch."""
        began = time.monotonic()
        self._progress.phase(f"asking {self._name} about {len(batch.rows)} rows")
        with waiting("teacher", f"the teacher to read {len(batch.rows)} rows"):
            batch, metrics = self._tutor.teach(batch, rollouts.outcomes, rollouts.traces)
        return batch, {**metrics, "teacher_seconds": time.monotonic() - began}


@contextmanager
def _open(context: CallbackContext) -> Iterator[TeacherCallback]:
    run, teacher = context.run, str(context.run.config.teacher)
    name = "the teacher's server" if at_endpoint(teacher) else "the teacher"
    with open_tutor(teacher, run.config, context.learner, context.load, run.check) as tutor:
        yield TeacherCallback(tutor, name, run.progress)
