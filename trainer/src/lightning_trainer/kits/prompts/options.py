"""The configuration of `lightning-rl prompts`: its options, and the models that propose and answer."""

from __future__ import annotations

from typing import Final

from pydantic import Field

from lightning_trainer.config.checked import CheckedRecord
from lightning_trainer.kits.prompts.fields import PromptsFields
from lightning_trainer.session.answers import AsItIs, Endpoint, Subject

LOOK: Final = 4  # number of tasks that are run at once to read the agents' prompts


class PromptsConfig(PromptsFields, CheckedRecord):
    """Options of `lightning-rl prompts`. Without `workers`, at most two run.

    Raises:
        ConfigError: an option is unknown or has a wrong value.
    """

    reflect: Endpoint
    """OpenAI-compatible server that proposes prompts."""
    leave_silent: bool = False
    """If an agent makes no call while prompts are read, leave its prompt unchanged instead of ending with an error."""
    subject: Subject = Field(default_factory=AsItIs)
    """The model that answers the agents' calls."""
    answered: tuple[str, ...] = ("*",)
    """Agents whose calls it answers, names or globs; the others stay at their own endpoints."""

    def least_budget(self, compared: int) -> int:
        """Return the fewest rollouts that read the prompts and try one proposal on so many tasks to choose by."""
        return 2 * compared + 2 * self.minibatch + LOOK
