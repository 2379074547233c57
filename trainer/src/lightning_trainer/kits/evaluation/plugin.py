"""Evaluation, registered through the public hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_spans.hooks import hookimpl
from lightning_trainer.commands import Listed


@hookimpl
def lightning_register_commands(register: Callable[[str, Any], None]) -> None:
    """Register the command."""
    register(
        "eval",
        Listed(
            "lightning_trainer.kits.evaluation.command",
            "Evaluate a model, a run or an endpoint: mean reward with its interval, and pass@k, by agent.",
            after="sft",
        ),
    )
