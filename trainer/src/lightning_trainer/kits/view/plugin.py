"""Registration of the viewer, through the same hooks as any plugin."""

from __future__ import annotations

from lightning_trainer.commands import ListedCommand, command_hook

lightning_register_commands = command_hook(
    view=ListedCommand(
        "lightning_trainer.kits.view.command",
        "Show a run in a web page: groups, rollouts, calls, tokens, credit.",
        after="runner",
    ),
)
