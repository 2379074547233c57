"""Registration of the replay commands, through the same hooks as any plugin."""

from __future__ import annotations

from lightning_trainer.commands import ListedCommand, command_hook

lightning_register_commands = command_hook(
    fork=ListedCommand(
        "lightning_trainer.kits.replay.fork_command",
        "Replay a recorded rollout with one model call changed.",
        after="traces",
    ),
    replay=ListedCommand(
        "lightning_trainer.kits.replay.replay_command",
        "Replay recorded rollouts against new code or another model, and report which still succeed.",
        after="fork",
    ),
)
