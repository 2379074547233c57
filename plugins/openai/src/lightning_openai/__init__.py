"""Every model call made with the openai client becomes one span, and goes where its agent's policy is."""

from __future__ import annotations

from typing import Any

import lightning_spans
from lightning_spans import Attachment, agent, emit_reward

__all__ = ["agent", "attach", "emit_reward"]


def attach(**options: Any) -> Attachment:
    """Record every call of the openai client; options and errors as of `lightning_spans.attach`."""
    return lightning_spans.attach("openai", **options)
