"""Learning-rate schedules of transformers, as functions of the number of steps taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lightning_trainer.backends.torch.model.quiet import quiet_libraries
from lightning_trainer.backends.torch.options import TorchOptions


def schedule(options: TorchOptions) -> Callable[[int], float]:
    """Return a function from the number of steps taken to the next step's share of the learning rate.

    A warm-up begins above 0 and a decay ends above its final value, so that no step is wasted.
    """
    with quiet_libraries():
        from transformers.optimization import get_scheduler

    name, more = _NAMES[options.lr_schedule]
    # On a separate optimiser: a scheduler counts the steps of its optimiser; ours are counted by the checkpoint.
    scheduler: Any = get_scheduler(
        name,
        torch.optim.SGD([torch.zeros(1)], lr=1.0),
        num_warmup_steps=options.warmup_steps,
        num_training_steps=options.total_steps,
        scheduler_specific_kwargs=more(options.min_lr_ratio),
    )
    share: Callable[[int], float] = scheduler.lr_lambdas[0]
    return lambda steps: share(steps + 1 if steps < options.warmup_steps else steps)


_NAMES: dict[str, tuple[str, Callable[[float], dict[str, float] | None]]] = {
    "constant": ("constant_with_warmup", lambda _: None),
    "linear": ("polynomial", lambda ratio: {"lr_end": ratio, "power": 1.0}),
    "cosine": ("cosine_with_min_lr", lambda ratio: {"min_lr_rate": ratio}),
}
