"""Reinforcement learning for agents that already exist.

Public names are imported when they are used, so that importing this package costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_trainer.config import TrainConfig
    from lightning_trainer.training import Result, train

__all__ = ["Result", "TrainConfig", "train"]


def __getattr__(name: str) -> Any:
    if name == "TrainConfig":
        return import_module("lightning_trainer.config").TrainConfig
    if name in __all__:
        return getattr(import_module("lightning_trainer.training"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
