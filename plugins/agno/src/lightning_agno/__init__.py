"""Train the Agno agents you already have, by name."""

from __future__ import annotations

from functools import partial
from typing import Final

import lightning_spans
from lightning_spans import agent, emit_reward

__all__ = ["agent", "attach", "emit_reward"]

FRAMEWORK: Final = "agno"

attach = partial(lightning_spans.attach, FRAMEWORK)
"""Record every agent, tool and model of Agno; see `lightning_spans.attach` for options and errors."""
