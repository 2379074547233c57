"""The loops whose folders are on this machine: the state of their newest round."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lightning_spans.errors import ConfigError
from lightning_trainer.kits.loop.record import STATUS_NAME, LoopRound, rounds_in
from lightning_trainer.kits.view.answers.deployments import LoopRow, LoopStageRow
from lightning_trainer.kits.view.runs import stamp_of

_EARLIER: Final = 20  # rounds before the newest one


@dataclass(frozen=True, slots=True)
class Loops:
    """The loops in a folder.

    Attributes:
        folder: of one loop, or of several; None: no loop is shown.
    """

    folder: Path | None = None

    def rows(self) -> list[LoopRow]:
        """Return the loops, sorted by agent."""
        return sorted((_loop_row(folder) for folder in self._folders()), key=lambda row: row.agent)

    @property
    def mark(self) -> tuple[int, ...]:
        """A value that changes with every stage, and with what a stage waits for."""
        return tuple(stamp for folder in self._folders() for stamp in stamp_of(folder / STATUS_NAME))

    def _folders(self) -> Iterator[Path]:
        if self.folder is None or not self.folder.is_dir():
            return
        for folder in (self.folder, *sorted(self.folder.iterdir())):
            if (folder / STATUS_NAME).is_file():
                yield folder


def _loop_row(folder: Path) -> LoopRow:
    try:
        rounds = rounds_in(folder)
        newest, end = rounds[-1], rounds[-1].end
        return LoopRow(
            agent=str(newest.options.get("agent", folder.name)),
            folder=str(folder),
            round=newest.number,
            outcome=None if end is None else end.outcome,
            reason="" if end is None else end.reason,
            stages=[
                LoopStageRow(stage=one.stage, state=one.state, done_s=one.at_s, text=one.text)
                for one in newest.stages()
            ],
            earlier=[_end_of(one) for one in reversed(rounds[:-1][-_EARLIER:])],
        )
    except (ConfigError, OSError, LookupError, TypeError, ValueError) as error:  # a folder that somebody changed
        return LoopRow(
            agent=folder.name, folder=str(folder), round=0, outcome=None, reason="", stages=[], earlier=[],
            problem=f"the record of the loop can't be read: {error}",
        )  # fmt: skip


def _end_of(one: LoopRound) -> str:
    end = one.end
    return f"round {one.number}: {'not ended' if end is None else f'{end.outcome}. {end.reason}'}"
