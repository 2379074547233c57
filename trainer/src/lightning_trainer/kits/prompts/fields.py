"""Options of `lightning-rl prompts`. The command's flags are made of them, so this module imports little."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from lightning_trainer.options.measuring import MeasuringOptions
from lightning_trainer.options.sampling import SeedOptions


class PromptsFields(SeedOptions, MeasuringOptions):
    """Which prompts to optimise, and how far."""

    agents: tuple[str, ...]
    """Agents whose system prompts to optimise."""
    budget: int = Field(ge=1)
    """Maximum number of rollouts."""
    out: Path
    """File for the best prompts."""  # the search's own folder is next to it, FILE.search
    val: Path | None = None
    """Tasks used to choose between prompts. Default: every other task of --data."""
    tokens: int | None = Field(default=None, ge=1)
    """Maximum number of tokens, rollouts and proposals together."""
    minibatch: int = Field(default=3, ge=1)
    """Tasks per proposal."""  # on which it is also tried first
