"""Algorithms: turn a batch of rollouts into training rows, and define their loss. One file per family.

Read `grpo`, `reinforce` or `ppo` from top to bottom; the steps that they call are in `lightning_trainer.rl.batch`,
`advantages` and `losses`. `protocol` defines what an algorithm is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_trainer import registry

if TYPE_CHECKING:
    from lightning_trainer.rl.algorithms.protocol import Algorithm


def algorithm_by_name(name: str) -> Algorithm:
    """Return an algorithm: built in, or registered by a plugin with `lightning_register_algorithms`.

    Raises:
        ConfigError: nothing has that name.
    """
    algorithm: Algorithm = registry.by_name("algorithm", name)
    return algorithm
