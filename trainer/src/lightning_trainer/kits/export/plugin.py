"""Registration of the export command, through the same hooks as any plugin."""

from __future__ import annotations

from lightning_trainer.commands import ListedCommand, command_hook

lightning_register_commands = command_hook(
    export=ListedCommand(
        "lightning_trainer.kits.export.command",
        "Write traces as data for other trainers and viewers: conversations, pairs, tokens, spans.",
        after="replay",
    ),
)
