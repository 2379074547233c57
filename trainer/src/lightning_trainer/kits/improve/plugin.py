"""Registers the choice between methods through the public hooks."""

from __future__ import annotations

from lightning_trainer.commands import ListedCommand, command_hook

lightning_register_commands = command_hook(
    improve=ListedCommand(
        "lightning_trainer.kits.improve.command",
        "Choose for each agent what improves it: prompts, fine-tuning, RL or distillation, within one budget.",
        after="prompts",
    ),
)
