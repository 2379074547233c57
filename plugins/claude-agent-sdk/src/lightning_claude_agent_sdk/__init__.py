"""Train the Claude Agent SDK agents you already have, by name."""

from __future__ import annotations

from functools import partial
from typing import Final

import lightning_spans
from lightning_spans import agent, emit_reward

__all__ = ["agent", "attach", "emit_reward"]

FRAMEWORK: Final = "claude-agent-sdk"
UNNAMED: Final = "claude"  # owner of the calls if `agent()` names nobody: the SDK's own agent has no name

attach = partial(lightning_spans.attach, FRAMEWORK)
"""Record what the SDK's command does, and route its calls to the gateway; see `lightning_spans.attach` for options."""
