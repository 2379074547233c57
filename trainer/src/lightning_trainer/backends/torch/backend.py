"""The backend named ``torch``: one policy in this process, generating and training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from lightning_trainer.backends.torch import checkpoint
from lightning_trainer.backends.torch.engine import TorchEngine, available_cores
from lightning_trainer.backends.torch.model import LoadedModel, load
from lightning_trainer.backends.torch.options import make_options
from lightning_trainer.backends.torch.policy import Policy, add_adapters, has_adapters, reference
from lightning_trainer.backends.torch.update import update
from lightning_trainer.rows import Row


class TorchBackend:
    """`Backend` with an embedded engine. The master weights and the optimiser are made with the first update."""

    def __init__(self, model: Path | str, **options: Any) -> None:
        """Load a model folder; `options` are the fields of `TorchOptions`.

        Raises:
            ConfigError: an option is wrong, or the model can't be loaded or run.
        """
        self.options = make_options(model, options)
        self._model = load(self.options)
        self._fingerprint = checkpoint.fingerprint(self._model)
        add_adapters(self._model, self.options)
        self._policy: Policy | None = None
        self._frozen: LoadedModel | None = None
        if self.options.kl_coef > 0 and not has_adapters(self._model):
            self._frozen = load(self.options)
        self._engine = TorchEngine(self._model, self.options)

    @property
    def engine(self) -> TorchEngine:
        """Generates with the newest weights."""
        return self._engine

    def update(self, rows: Sequence[Row]) -> dict[str, float]:
        """Take one optimiser step: `Backend.update`, with the metrics of `update.update`."""
        with self._engine.still():
            torch.set_num_threads(self.options.threads or available_cores())
            metrics = update(self._model, self._trained(), rows, self.options, self._reference())
            self._engine.weights_changed(self._engine.version + 1)
        return metrics

    def save(self, folder: Path) -> None:
        """Write a checkpoint: `checkpoint.save`."""
        with self._engine.still():
            checkpoint.save(folder, self._model, self._trained(), self._engine, self._fingerprint)

    def load(self, folder: Path) -> None:
        """Go back to a checkpoint, bit for bit: `checkpoint.restore`.

        Raises:
            ConfigError: it is a checkpoint of another model or kind, or incomplete.
        """
        with self._engine.still():
            version = checkpoint.restore(folder, self._model, self._trained(), self._engine, self._fingerprint)
            self._engine.weights_changed(version)

    def close(self) -> None:
        """Stop the engine and free memory."""
        self._engine.close()
        self._policy = self._frozen = None

    def _trained(self) -> Policy:
        if self._policy is None:
            self._policy = Policy(self._model, self.options)
        return self._policy

    def _reference(self) -> Any:
        return reference(self._model, self._frozen) if self.options.kl_coef > 0 else None
