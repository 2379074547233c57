"""Supervised fine-tuning, registered through the public hooks."""

from __future__ import annotations

from lightning_trainer.commands import ListedCommand, command_hook

lightning_register_commands = command_hook(
    sft=ListedCommand(
        "lightning_trainer.kits.sft.command",
        "Supervised fine-tuning on conversations from files, stores or a larger model.",
        after="train",
    ),
)
