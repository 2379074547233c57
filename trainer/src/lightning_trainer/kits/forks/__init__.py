"""Forks: an earlier attempt is run again up to one of its calls, and continues from there with another answer.

`recorded` reads the attempt, `plan` makes rollouts that a session or any runner runs, and `result` returns their
outcome. `lightning_trainer.kits.replay` does all of it with a program and a model. Public names are imported when they
are used, so that registering the kit costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from lightning_trainer.kits.forks.planning import RecordedAttempt, plan, recorded
    from lightning_trainer.kits.forks.results import Continuation, EndedFork, ForkResult, result

__all__ = ["Continuation", "EndedFork", "ForkResult", "RecordedAttempt", "plan", "recorded", "result"]

_PLANNING: Final = ("RecordedAttempt", "plan", "recorded")


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{'planning' if name in _PLANNING else 'results'}"), name)
