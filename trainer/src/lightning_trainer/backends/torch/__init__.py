"""The embedded backend: generation and training of one policy, or of several adapters, in this process.

Torch is imported when it is first used: `backend` and `options` are light.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from lightning_trainer.backends.torch.generate.engine import TorchEngine
    from lightning_trainer.backends.torch.learner import TorchLearner
    from lightning_trainer.backends.torch.options import TorchOptions

__all__ = ["TorchEngine", "TorchLearner", "TorchOptions"]

_HOMES: Final = {"TorchEngine": "generate.engine", "TorchLearner": "learner", "TorchOptions": "options"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
