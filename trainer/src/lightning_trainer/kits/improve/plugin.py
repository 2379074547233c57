"""Registers the choice between methods through the public hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_spans.hooks import hookimpl
from lightning_trainer.commands import Listed


@hookimpl
def lightning_register_commands(register: Callable[[str, Any], None]) -> None:
    """Register the command."""
    register(
        "improve",
        Listed(
            "lightning_trainer.kits.improve.command",
            "Choose for each agent what improves it: prompts, fine-tuning, RL or distillation, within one budget.",
            after="prompts",
        ),
    )
