"""Registration of the kinds of environments, through the same hook as any plugin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_spans.hooks import hookimpl


@hookimpl
def lightning_register_environments(register: Callable[[str, Any], None]) -> None:
    """Register the kinds of environments."""
    from lightning_trainer.kits.environments import from_openenv, from_verifiers

    register("verifiers", from_verifiers)
    register("openenv", from_openenv)
