"""Registers the loop through the public hooks."""

from __future__ import annotations

from lightning_trainer.commands import ListedCommand, command_hook

lightning_register_commands = command_hook(
    loop=ListedCommand(
        "lightning_trainer.kits.loop.command",
        "Improve an agent in production in rounds: select live traces, train, evaluate, shadow, canary, approval.",
        after="deploy",
    ),
)
