"""Train the CrewAI agents you already have, by role."""

from __future__ import annotations

from functools import partial
from typing import Final

import lightning_spans
from lightning_spans import agent, emit_reward

__all__ = ["agent", "attach", "emit_reward"]

FRAMEWORK: Final = "crewai"

attach = partial(lightning_spans.attach, FRAMEWORK)
"""Record every agent, tool and model of CrewAI; see `lightning_spans.attach` for options and errors."""
