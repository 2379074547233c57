"""The embedded backend: generation and training of one policy in this process. Importing it imports torch."""

from __future__ import annotations

from lightning_trainer.backends.torch.backend import TorchBackend
from lightning_trainer.backends.torch.engine import TorchEngine
from lightning_trainer.backends.torch.options import TorchOptions

__all__ = ["TorchBackend", "TorchEngine", "TorchOptions"]
