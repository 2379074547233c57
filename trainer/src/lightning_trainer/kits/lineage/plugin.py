"""Registers lineage through the public hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_spans.hooks import hookimpl
from lightning_trainer.commands import ListedCommand, command_hook


@hookimpl
def lightning_register_callbacks(register: Callable[[str, Any], None]) -> None:
    """Register the callback that writes the manifest."""
    from lightning_trainer.kits.lineage.callback import LineageKind

    register("lineage", LineageKind())


lightning_register_commands = command_hook(
    lineage=ListedCommand(
        "lightning_trainer.kits.lineage.command",
        "What a checkpoint learned from, or which checkpoints learned from a call or trace.",
        after="traces",
    ),
)
