"""Train the Pydantic AI agents you already have, by name."""

from __future__ import annotations

from typing import Any

import lightning_spans
from lightning_spans import Attachment, agent, emit_reward

__all__ = ["agent", "attach", "emit_reward"]


def attach(**options: Any) -> Attachment:
    """Record every agent, tool and model of Pydantic AI; options and errors as of `lightning_spans.attach`."""
    return lightning_spans.attach("pydantic-ai", **options)
