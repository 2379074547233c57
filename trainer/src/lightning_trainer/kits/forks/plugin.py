"""Registration of the forks of a step, through the same hook as any plugin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_spans.hooks import hookimpl


@hookimpl
def lightning_register_callbacks(register: Callable[[str, Any], None]) -> None:
    """Register the forks."""
    from lightning_trainer.kits.forks.callback import ForksKind

    register("forks", ForksKind())
