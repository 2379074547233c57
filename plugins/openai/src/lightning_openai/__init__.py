"""Records every model call made with the openai client as one span, and sends it to its agent's policy."""

from __future__ import annotations

from typing import Any

import lightning_spans
from lightning_spans import Attachment, agent, emit_reward

__all__ = ["agent", "attach", "emit_reward"]


def attach(**options: Any) -> Attachment:
    """Record every call of the openai client. Options and errors are those of `lightning_spans.attach`."""
    return lightning_spans.attach("openai", **options)
