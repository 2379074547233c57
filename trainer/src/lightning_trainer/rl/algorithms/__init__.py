"""Algorithms: from what a batch of rollouts left in the store to training rows, and their loss. One file a family.

Read `grpo`, `reinforce` or `ppo` from top to bottom; the steps that they call stand in `lightning_trainer.rl.batch`,
`advantages` and `losses`. `protocol` says what an algorithm is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_trainer import registry

if TYPE_CHECKING:
    from lightning_trainer.rl.algorithms.protocol import Algorithm


def algorithm_by_name(name: str) -> Algorithm:
    """Return an algorithm: ours, or one that a plugin registers by `lightning_register_algorithms`.

    Raises:
        ConfigError: nothing has that name.
    """
    algorithm: Algorithm = registry.by_name("algorithm", name)
    return algorithm
