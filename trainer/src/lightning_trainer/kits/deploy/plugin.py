"""Registers deployment through the public hooks."""

from __future__ import annotations

from lightning_trainer.commands import ListedCommand, command_hook

lightning_register_commands = command_hook(
    deploy=ListedCommand(
        "lightning_trainer.kits.deploy.command",
        "Bring a candidate policy to users, agent by agent: candidate, shadow, canary, promote, rollback.",
        after="server",
    ),
)
