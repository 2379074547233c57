"""The learning methods of a loop, by the name that `[train] method` has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from lightning_trainer.kits.loop.record import StageResult
from lightning_trainer.report.progress import Progress

if TYPE_CHECKING:
    from lightning_trainer.kits.loop.config import LoopConfig

# Facts of the stage `train` that later stages read. A candidate has a checkpoint, prompts, or a served model.
MODEL = "model"  # what the candidate is compared with, as in `eval --model`
CHECKPOINT = "checkpoint"  # folder with the agent's adapter
PROMPTS = "prompts"  # file with the agent's prompt, for `base`
SERVED = "served"  # model that the server has already
ENDPOINT = "endpoint"  # model of a candidate without a checkpoint, as in `eval --model`; by default MODEL


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundInput:
    """What a round learns from.

    Attributes:
        data: its tasks.
        out: folder of the method.
        model: the model that an earlier round promoted; None: the configured model.
        stable: the policy that answers the agent today; None: it has no deployment yet.
    """

    data: Path
    out: Path
    model: str | None = None
    stable: str | None = None


class LearningMethod(Protocol):
    """Makes the candidate of a round."""

    needs_base: bool

    @property
    def forecast_by(self) -> str | None:
        """The command whose ``--dry-run`` forecasts time and memory; None: the method trains nothing."""
        ...

    def check(self, config: LoopConfig) -> None:
        """Reject invalid options of `[train]` before anything is started.

        Raises:
            ConfigError: an option is invalid.
        """
        ...

    def learn(self, config: LoopConfig, given: RoundInput, progress: Progress) -> StageResult:
        """Make the candidate, resuming where an interrupted process stopped.

        Returns:
            The facts above; or how the round ends, if there is no candidate.
        """
        ...

    def eval_options(self, config: LoopConfig, given: RoundInput) -> Mapping[str, Any]:
        """Return how the program is run and scored, as options of `EvalConfig`."""
        ...

    def cost(self, config: LoopConfig, given: RoundInput, tasks: int) -> Mapping[str, int]:
        """Return what a round with so many tasks takes at most: ``steps``, ``rollouts`` or ``tokens``.

        Raises:
            ConfigError: it can't work with so many tasks.
        """
        ...
