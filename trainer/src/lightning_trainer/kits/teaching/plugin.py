"""The teacher, registered through the public hook."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_spans.hooks import hookimpl


@hookimpl
def lightning_register_callbacks(register: Callable[[str, Any], None]) -> None:
    """Register the teacher."""
    from lightning_trainer.kits.teaching.callback import TeacherKind

    register("teacher", TeacherKind())
