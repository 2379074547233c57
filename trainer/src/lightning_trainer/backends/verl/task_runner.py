"""verl's task runner, after our trainers are registered: `run_ppo` takes the class as an argument."""

from __future__ import annotations

from typing import Any

import ray
from verl.trainer.main_ppo import TaskRunnerV1

_VERLS: Any = TaskRunnerV1.__ray_metadata__.modified_class  # the class that ray.remote made an actor of


class _TaskRunner:
    """Runs the training loop, in a process that Ray starts."""

    def run(self, config: Any) -> None:
        """Train."""
        from lightning_trainer.backends.verl import registrations  # noqa: F401 - they register themselves
        from lightning_trainer.backends.verl.steps import trainers  # noqa: F401 - they register themselves

        _VERLS().run(config)


TaskRunner: Any = ray.remote(_TaskRunner)
