"""Backends: what generates with a policy and updates it. Chosen by name: ``torch`` (embedded) or a plugin's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from lightning_trainer.engine import Engine
    from lightning_trainer.rows import Row


class Backend(Protocol):
    """One policy: its engine, its weights, its optimiser."""

    @property
    def engine(self) -> Engine:
        """Generates with the newest weights."""
        ...

    def update(self, rows: Sequence[Row]) -> dict[str, float]:
        """Take one optimiser step on these rows and publish the weights to the engine.

        Returns:
            Metrics by name: loss, grad_norm, clip_fraction, kl, entropy, logprob_gap (mean absolute difference between
            the engine's recorded log-probabilities and the trainer's), tokens, seconds.
        """
        ...

    def save(self, folder: Path) -> None:
        """Write weights (a model folder that `serve` and transformers can load), optimiser and random state."""
        ...

    def load(self, folder: Path) -> None:
        """Go back to what `save` wrote, bit for bit.

        Raises:
            ConfigError: the folder is a checkpoint of another model or kind.
        """
        ...

    def close(self) -> None:
        """Stop the engine and free memory."""
        ...
