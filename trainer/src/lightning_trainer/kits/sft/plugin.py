"""Supervised fine-tuning, registered through the public hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_spans.hooks import hookimpl
from lightning_trainer.commands import Listed


@hookimpl
def lightning_register_commands(register: Callable[[str, Any], None]) -> None:
    """Register the command."""
    register(
        "sft",
        Listed(
            "lightning_trainer.kits.sft.command",
            "Supervised fine-tuning on conversations from files, stores or a larger model.",
            after="train",
        ),
    )
