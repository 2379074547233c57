"""Evaluation, registered through the public hooks."""

from __future__ import annotations

from lightning_trainer.commands import ListedCommand, command_hook

lightning_register_commands = command_hook(
    eval=ListedCommand(
        "lightning_trainer.kits.evaluation.command",
        "Evaluate a model, a run or an endpoint: mean reward with its interval, and pass@k, by agent.",
        after="sft",
    ),
)
