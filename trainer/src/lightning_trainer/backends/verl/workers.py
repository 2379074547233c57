"""verl's workers of actor and critic, which resume with the options of the run that resumes.

verl loads the learning rate from the checkpoint, together with the moments and the step of the schedule. It counts only
the checkpoints of the current start when it removes old ones.

verl creates the critic's model configuration in the trainer's process and sends the finished object, so `external_lib`
is not imported in the critic's process. Unpickling `CriticWorker` imports our registrations there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from verl.single_controller.base.decorator import Dispatch, register
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

from lightning_trainer.backends.verl import registrations  # noqa: F401 - registers itself
from lightning_trainer.models.verl_folders import step_of


class LearnerWorker(TrainingWorker):  # type: ignore[misc]  # verl has no types
    """verl's training worker."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]  # verl has no types
    def load_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> None:
        """Load a checkpoint, except for the options of the optimiser, and count the checkpoints before it."""
        if not isinstance(self.engine.lr_scheduler, LambdaLR):  # an engine that the table `verl` chooses
            super().load_checkpoint(local_path, *args, **kwargs)
            return
        with keep_options(self.engine.optimizer, self.engine.lr_scheduler):
            super().load_checkpoint(local_path, *args, **kwargs)
        self.engine.checkpoint_manager.previous_saved_paths = paths_until(Path(local_path))


class CriticWorker(LearnerWorker):
    """The worker of the critic."""


class ActorWorker(ActorRolloutRefWorker):  # type: ignore[misc]  # verl has no types
    """verl's worker of actor and rollout."""

    actor_worker_cls = LearnerWorker


def paths_until(loaded: Path) -> list[str]:
    """Return the same part of all checkpoints of a run, such as ``actor``, up to this one, oldest first."""
    parts = loaded.parent.parent.glob(f"global_step_*/{loaded.name}")
    return [str(part) for part in sorted(parts, key=_step) if _step(part) <= _step(loaded)]


def _step(part: Path) -> int:
    return step_of(part.parent)


@contextmanager
def keep_options(optimiser: Optimizer, schedule: LambdaLR) -> Iterator[None]:
    """Keep the options of an optimiser, such as the learning rate, while the block loads the states of both."""
    options = [{name: value for name, value in group.items() if name != "params"} for group in optimiser.param_groups]
    rates = schedule.base_lrs
    yield
    schedule.base_lrs = rates
    schedule._last_lr = [rate * at(schedule.last_epoch) for rate, at in zip(rates, schedule.lr_lambdas, strict=True)]
    for group, own, rate in zip(optimiser.param_groups, options, schedule._last_lr, strict=True):
        group.update(own, lr=rate)
