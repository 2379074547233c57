"""The checks of rewards, registered through the public hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_spans.hooks import hookimpl
from lightning_trainer.commands import Listed


@hookimpl
def lightning_register_commands(register: Callable[[str, Any], None]) -> None:
    """Register the command."""
    register(
        "rewards",
        Listed(
            "lightning_trainer.kits.rewards.command",
            "Attack a reward: find out whether it pays rollouts that do not do the task.",
            after="eval",
        ),
    )
