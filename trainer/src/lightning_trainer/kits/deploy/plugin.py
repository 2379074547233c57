"""Registers deployment through the public hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_spans.hooks import hookimpl
from lightning_trainer.commands import Listed


@hookimpl
def lightning_register_commands(register: Callable[[str, Any], None]) -> None:
    """Register the command."""
    register(
        "deploy",
        Listed(
            "lightning_trainer.kits.deploy.command",
            "Bring a candidate policy to users, agent by agent: candidate, shadow, canary, promote, rollback.",
            after="server",
        ),
    )
