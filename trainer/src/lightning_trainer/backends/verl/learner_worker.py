"""verl's workers of actor and critic, which resume with the optimiser's options of the run that resumes.

verl loads the learning rate from the checkpoint, together with the moments and the step of the schedule.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from verl.single_controller.base.decorator import Dispatch, register
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker


class LearnerWorker(TrainingWorker):  # type: ignore[misc]  # verl has no types
    """verl's training worker."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]  # verl has no types
    def load_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Load a checkpoint, except for the options of the optimiser."""
        if not isinstance(self.engine.lr_scheduler, LambdaLR):  # an engine that the table `verl` chooses
            super().load_checkpoint(*args, **kwargs)
            return
        with keep_options(self.engine.optimizer, self.engine.lr_scheduler):
            super().load_checkpoint(*args, **kwargs)


class ActorWorker(ActorRolloutRefWorker):  # type: ignore[misc]  # verl has no types
    """verl's worker of actor and rollout."""

    actor_worker_cls = LearnerWorker


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
