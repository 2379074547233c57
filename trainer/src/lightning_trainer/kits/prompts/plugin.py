"""Prompt optimisation, registered through the public hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_spans.hooks import hookimpl
from lightning_trainer.commands import ListedCommand, command_hook

lightning_register_commands = command_hook(
    prompts=ListedCommand(
        "lightning_trainer.kits.prompts.command",
        "Optimise the system prompts of the agents you name.",
        after="eval",
    ),
)


@hookimpl
def lightning_register_callbacks(register: Callable[[str, Any], None]) -> None:
    """Register the callback for dead groups."""
    from lightning_trainer.kits.prompts.dead_groups.callback import DeadGroupsKind

    register("dead_groups", DeadGroupsKind())  # before the lineage, which lists its rows
