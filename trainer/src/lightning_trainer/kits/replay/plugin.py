"""Registration of the replay commands, through the same hooks as any plugin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_spans.hooks import hookimpl
from lightning_trainer.commands import Listed


@hookimpl
def lightning_register_commands(register: Callable[[str, Any], None]) -> None:
    """Register the commands."""
    register(
        "fork",
        Listed(
            "lightning_trainer.kits.replay.fork_command",
            "Replay a recorded rollout with one model call changed.",
            after="traces",
        ),
    )
    register(
        "replay",
        Listed(
            "lightning_trainer.kits.replay.replay_command",
            "Replay recorded rollouts against new code or another model, and report which still succeed.",
            after="fork",
        ),
    )
