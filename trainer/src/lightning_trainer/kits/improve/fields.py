"""The options of `lightning-rl improve`. The command's flags are made of them, so this module imports little."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from lightning_trainer.options.record import OptionRecord


class ImproveFields(OptionRecord):
    """What a search may spend, and on what."""

    budget: int = Field(ge=1)
    """Tokens that all methods of all agents may spend together: those of model calls on training tasks (prompts and
    answers), and those that updates compute."""
    methods: tuple[str, ...]
    """Methods to choose between: prompts (optimisation of system prompts; needs --reflect), sft (rejection sampling:
    fine-tuning on the best rollouts), rl, distil (needs --teacher). [default: all that have what they need]"""
    samples: int = Field(default=4, ge=1)
    """Rollouts per held-out task."""
    sft: dict[str, Any] = Field(default_factory=dict)
    """Option of sft --rounds, such as learning_rate. May be repeated."""
