"""Algorithms: from what a batch of rollouts left in the store to training rows. Chosen by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from lightning_spans.errors import ConfigError
from lightning_trainer.recipes import RECIPES

if TYPE_CHECKING:
    from lightning_trainer.algorithms.rl import Algorithm
    from lightning_trainer.config import TrainConfig

AlgorithmFactory: TypeAlias = "Callable[[TrainConfig], Algorithm]"


def algorithm_by_name(config: TrainConfig) -> Algorithm:
    """Make the algorithm that a configuration asks for: ours, or one that a plugin registers.

    Raises:
        ConfigError: nothing has that name, or an option of the algorithm is wrong.
    """
    from lightning_spans.plugins import registry
    from lightning_trainer.algorithms.rl import from_recipe

    known: dict[str, AlgorithmFactory] = registry("lightning_register_algorithms") | dict.fromkeys(RECIPES, from_recipe)
    if config.algorithm not in known:
        raise ConfigError(f"unknown algorithm {config.algorithm!r}. Use one of: {', '.join(sorted(known))}.")
    return known[config.algorithm](config)
