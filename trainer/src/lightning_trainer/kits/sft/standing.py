"""Where learning from files stands, as kept in the run's folder until it has ended."""

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
    """Where the loop stands.

    Attributes:
        taken: steps.
        before: loss that was seen before the first; None: not looked yet.
        lowest: loss that was seen since; None: none was.
        best: steps after which it was.
        waited: looks since then.
        tokens: learned.
        seconds: that steps and looks took.
    """

    taken: int = 0
    before: float | None = None
    lowest: float | None = None
    best: int = 0
    waited: int = 0
    tokens: int = 0
    seconds: float = 0.0


@dataclass(slots=True, kw_only=True)
class Kept:
    """What is kept of a run, first of nothing.

    Attributes:
        folder: of the run.
        data: fingerprint of what is learned and looked at.
        standing: where it stands.
        weights: folder in it of the learner's part; "" while nothing is kept.
    """

    folder: Path
    data: str
    standing: Standing = field(default_factory=Standing)
    weights: str = ""

    @classmethod
    def read(cls, folder: Path, data: str) -> Kept:
        """Read what an earlier life kept.

        Raises:
            ConfigError: nothing is kept, it can't be read, or the data is not what it was.
        """
        values = resume.read(folder, STATE_NAME)
        try:
            kept = cls(folder=folder, **{**values, "standing": Standing(**values["standing"])})
        except (TypeError, KeyError) as error:
            raise resume.damaged(folder, STATE_NAME, error) from None
        check_unchanged(folder, {"data": kept.data}, {"data": data})
        return kept

    def restore(self, learner: Learner) -> None:
        """Bring a learner to where it was.

        Raises:
            ConfigError: what was kept is of another model.
        """
        if self.weights:
            learner.load(self.folder / self.weights)

    def keep(self, learner: Learner, standing: Standing) -> None:
        """Keep where a learner stands; what was kept before goes."""
        values = {"data": self.data, "standing": asdict(standing)}
        self.weights = resume.keep(self.folder, STATE_NAME, values, learner, self.weights)
        self.standing = standing
