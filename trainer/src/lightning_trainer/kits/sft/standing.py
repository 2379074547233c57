"""The state of learning from files, as saved in the run's folder until it has finished."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from lightning_trainer.backend_protocol import Learner
from lightning_trainer.kits.sft import resume
from lightning_trainer.session.folder import check_unchanged

STATE_NAME: Final = "learning.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """The state of the loop.

    Attributes:
        taken: number of steps taken.
        before: loss before the first step; None: not evaluated yet.
        lowest: lowest loss evaluated since; None: none yet.
        best: number of steps after which it was evaluated.
        waited: number of evaluations since then.
        tokens: number of tokens learned.
        seconds: duration of steps and evaluations.
    """

    taken: int = 0
    before: float | None = None
    lowest: float | None = None
    best: int = 0
    waited: int = 0
    tokens: int = 0
    seconds: float = 0.0


@dataclass(slots=True, kw_only=True)
class SavedState:
    """The saved state of a run; empty at first.

    Attributes:
        folder: of the run.
        data: fingerprint of the training and held-out data.
        standing: state of the loop.
        weights: folder in it of the learner's part; "" while nothing is saved.
    """

    folder: Path
    data: str
    standing: Standing = field(default_factory=Standing)
    weights: str = ""

    @classmethod
    def read(cls, folder: Path, data: str) -> SavedState:
        """Read the state that an earlier process saved.

        Raises:
            ConfigError: nothing was saved, it cannot be read, or the data has changed.
        """
        values = resume.read(folder, STATE_NAME)
        try:
            kept = cls(folder=folder, **{**values, "standing": Standing(**values["standing"])})
        except (TypeError, KeyError) as error:
            raise resume.damaged_file(folder, STATE_NAME, error) from None
        check_unchanged(folder, {"data": kept.data}, {"data": data})
        return kept

    def restore(self, learner: Learner) -> None:
        """Restore a learner to the saved state.

        Raises:
            ConfigError: the saved state belongs to another model.
        """
        if self.weights:
            learner.load(self.folder / self.weights)

    def keep(self, learner: Learner, standing: Standing) -> None:
        """Save the state of a learner, and remove the previous one."""
        values = {"data": self.data, "standing": asdict(standing)}
        self.weights = resume.keep(self.folder, STATE_NAME, values, learner, self.weights)
        self.standing = standing
