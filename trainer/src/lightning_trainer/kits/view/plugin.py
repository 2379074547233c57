"""Registration of the viewer, through the same hooks as any plugin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_spans.hooks import hookimpl
from lightning_trainer.commands import Listed


@hookimpl
def lightning_register_commands(register: Callable[[str, Any], None]) -> None:
    """Register the command."""
    register(
        "view",
        Listed(
            "lightning_trainer.kits.view.command",
            "Show a run in a web page: groups, rollouts, calls, tokens, credit.",
            after="runner",
        ),
    )
