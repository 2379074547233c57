"""The checks of rewards, registered through the public hooks."""

from __future__ import annotations

from lightning_trainer.commands import ListedCommand, command_hook

lightning_register_commands = command_hook(
    rewards=ListedCommand(
        "lightning_trainer.kits.rewards.command",
        "Attack a reward: find out whether it pays rollouts that do not do the task.",
        after="eval",
    ),
)
