"""The comparison of methods, registered through the hooks that anybody would use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_spans.hooks import hookimpl
from lightning_trainer.commands import Listed


@hookimpl
def lightning_register_commands(register: Callable[[str, Any], None]) -> None:
    """Register the command."""
    register(
        "compare",
        Listed(
            "lightning_trainer.kits.compare.command",
            "Compare training, rejection sampling and prompts with the same budget on the same held-out tasks.",
            after="prompts",
        ),
    )
