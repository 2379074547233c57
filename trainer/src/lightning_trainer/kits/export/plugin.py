"""Registration of the export command, through the same hooks as any plugin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_spans.hooks import hookimpl
from lightning_trainer.commands import Listed


@hookimpl
def lightning_register_commands(register: Callable[[str, Any], None]) -> None:
    """Register the command."""
    register(
        "export",
        Listed(
            "lightning_trainer.kits.export.command",
            "Write traces as data for other trainers and viewers: conversations, pairs, tokens, spans.",
            after="replay",
        ),
    )
