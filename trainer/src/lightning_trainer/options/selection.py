"""Options that choose among recorded attempts."""

from __future__ import annotations

from pydantic import Field

from lightning_trainer.options.record import OptionRecord


class SelectionOptions(OptionRecord):
    """Which recorded attempts are used."""

    min_reward: float | None = None
    """Minimum reward of a line, for lines that have rewards."""
    best: int | None = Field(default=None, ge=1)
    """Use only the N attempts with the highest reward of each group and agent (stores)."""
    origin: str | None = None
    """Use only traces of this origin: training, live, or your own label (stores)."""
