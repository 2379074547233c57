"""Options of `lightning-rl prompts`."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from pydantic import Field

from lightning_trainer.config.checked import CheckedRecord
from lightning_trainer.options.measuring import MeasuringOptions
from lightning_trainer.session.answers import AsItIs, Endpoint, Subject

LOOK: Final = 4  # number of tasks that are run at once to read the agents' prompts


class PromptsConfig(MeasuringOptions, CheckedRecord):
    """Options of `lightning-rl prompts`. Without `workers`, at most two run.

    Raises:
        ConfigError: an option is unknown or has a wrong value.
    """

    agents: tuple[str, ...]
    """Whose prompts are proposed anew."""
    reflect: Endpoint
    """The model that proposes."""
    budget: int = Field(ge=1)
    """Maximum number of rollouts."""
    out: Path
    """File for the result; the search's own folder is next to it, FILE.search."""
    leave_silent: bool = False
    """If an agent makes no call while prompts are read, leave its prompt unchanged instead of ending with an error."""
    val: Path | None = None
    """Tasks to choose by. Default: every other one of the tasks."""
    subject: Subject = Field(default_factory=AsItIs)
    """The model that answers the agents' calls."""
    answered: tuple[str, ...] = ("*",)
    """Agents whose calls it answers, names or globs; the others stay at their own endpoints."""
    tokens: int | None = Field(default=None, ge=1)
    """Maximum tokens of rollouts and of the reflecting model together."""
    minibatch: int = Field(default=3, ge=1)
    """Tasks from which a proposal is made, and on which it is tried first."""
    seed: int = Field(default=0, ge=0)
    """Of GEPA's choices, and of answers that are sampled here: each batch is sampled with the same numbers."""

    def least_budget(self, compared: int) -> int:
        """Return the fewest rollouts that read the prompts and try one proposal on so many tasks to choose by."""
        return 2 * compared + 2 * self.minibatch + LOOK
