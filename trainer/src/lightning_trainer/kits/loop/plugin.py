"""Registers the loop through the public hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_spans.hooks import hookimpl
from lightning_trainer.commands import Listed


@hookimpl
def lightning_register_commands(register: Callable[[str, Any], None]) -> None:
    """Register the command."""
    register(
        "loop",
        Listed(
            "lightning_trainer.kits.loop.command",
            "Improve an agent in production in rounds: select live traces, train, evaluate, shadow, canary, approval.",
            after="deploy",
        ),
    )
