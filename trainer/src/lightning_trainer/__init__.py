"""Reinforcement learning for agents that already exist.

Public names are imported when they are used, so that importing this package costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from lightning_trainer.config.train import TrainConfig
    from lightning_trainer.run.result import Result
    from lightning_trainer.run.train import train

__all__ = ["Result", "TrainConfig", "train"]

_HOMES: Final = {"Result": "run.result", "TrainConfig": "config.train", "train": "run.train"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
