"""The results of rounds, and their state as saved in the run's folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from lightning_trainer.kits.sft import resume
from lightning_trainer.kits.sft.fit import FitResult

STATE_NAME: Final = "rounds.json"  # in the run's folder, until the last round is done
RESULT_NAME: Final = "result.json"  # also there, after the last round: the results


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Result of one round.

    Attributes:
        number: from 1.
        reward: mean reward of the samples, before the round's learning.
        rows: number of rows learned from.
        fitted: losses and steps.
        held_out: mean reward of the held-out tasks after it; None without such tasks.
        left_out: calls and conversations in no row, by reason.
    """

    number: int
    reward: float | None
    rows: int
    fitted: FitResult
    held_out: float | None = None
    left_out: dict[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return what the command prints about the round."""
        return {
            "round": self.number, "reward": self.reward, "rows": self.rows, "steps": self.fitted.steps,
            "loss_before": self.fitted.before, "loss_after": self.fitted.after, "held_out": self.held_out,
            "left_out": self.left_out,
        }  # fmt: skip

    @classmethod
    def from_state(cls, values: Mapping[str, Any]) -> Round:
        """Read the output of `dataclasses.asdict`."""
        return cls(**{**values, "fitted": FitResult(**values["fitted"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundsState:
    """The state of the rounds, as saved in the run's folder.

    Attributes:
        done: completed rounds.
        before: mean reward of the held-out tasks before the first.
        data: fingerprint of the tasks.
        weights: folder next to the file with weights and optimiser state; "" before the first round is done.
        seconds: duration of the rounds.
    """

    data: str
    done: tuple[Round, ...] = ()
    before: float | None = None
    weights: str = ""
    seconds: float = 0.0

    @property
    def steps(self) -> int:
        """Number of steps taken."""
        return sum(each.fitted.steps for each in self.done)

    @classmethod
    def read(cls, folder: Path) -> RoundsState:
        """Read the state.

        Raises:
            ConfigError: there is none, or it cannot be read.
        """
        values = resume.read(folder, STATE_NAME)
        try:
            return cls(**{**values, "done": tuple(Round.from_state(each) for each in values["done"])})
        except (TypeError, KeyError) as error:
            raise resume.damaged_file(folder, STATE_NAME, error) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """Result of all rounds.

    Attributes:
        rounds: those in which something was learned; at least one.
        folder: of the run.
        checkpoint: a model folder with the weights of the last round.
        before: mean reward of the held-out tasks before the first; None without such tasks.
        seconds: duration, including that of earlier parts.
    """

    rounds: tuple[Round, ...]
    folder: Path
    checkpoint: Path
    before: float | None = None
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Return what the command prints."""
        first, last = self.rounds[0], self.rounds[-1]
        return {
            "loss_before": first.fitted.before, "loss_after": last.fitted.after, "checkpoint": str(self.checkpoint),
            "folder": str(self.folder), "reward_before": self.before, "reward_after": last.held_out,
            "rounds": [each.to_json() for each in self.rounds], "seconds": round(self.seconds, 1),
        }  # fmt: skip
