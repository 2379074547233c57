"""Recorded attempts run again: with another answer to one call, with new code, or with another model.

Public names are imported when they are used, so that registering the commands costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from lightning_trainer.kits.replay.forking import ForkConfig, ForkedAttempt, fork
    from lightning_trainer.kits.replay.regression import Regression, ReplayConfig, replay_all
    from lightning_trainer.kits.replay.running import Program

__all__ = ["ForkConfig", "ForkedAttempt", "Program", "Regression", "ReplayConfig", "fork", "replay_all"]

_HOMES: Final = {
    "ForkConfig": "forking",
    "ForkedAttempt": "forking",
    "fork": "forking",
    "Regression": "regression",
    "ReplayConfig": "regression",
    "replay_all": "regression",
    "Program": "running",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
