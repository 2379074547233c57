"""Groups of rollouts without a training row: verl drops them and requests others, without end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from lightning_spans.errors import LightningError
from lightning_trainer.rl.batch.batch import Batch
from lightning_trainer.rl.rollouts import Outcome

_BATCHES: Final = 4  # without a row, after there have been rows


class NothingCollectedError(LightningError):
    """Too many consecutive groups gave no row; the message says why."""


class EmptyGroups:
    """Counts consecutive groups without a row.

    Args:
        batch_size: groups of a step.
    """

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size
        self._count = 0
        self._had_rows = False

    def add(self, batch: Batch, ended: Sequence[Outcome], *, begun: bool) -> None:
        """Count a group.

        Args:
            batch: made of it.
            ended: its rollouts.
            begun: whether the run has learned from rows before this start.

        Raises:
            NothingCollectedError: one batch of groups had no row, or four if others had some before.
        """
        if batch.rows:
            self._count, self._had_rows = 0, True
            return
        self._count += 1
        if self._count < self._batch_size * (_BATCHES if begun or self._had_rows else 1):
            return
        errors = [outcome.error for outcome in ended if outcome.error]
        agents = ", ".join(f"{name or 'without a name'}: {count} calls" for name, count in batch.agents.items())
        facts = "\n".join(f"  {line}" for line in batch.account.lines())
        raise NothingCollectedError(
            f"the last {self._count} groups of rollouts had no training rows.\n"
            + (f"The last error:\n{errors[-1][-2000:]}\n" if errors else "")
            + f"Agents seen in the last group: {agents or 'none'}.\n{facts}\n"
            "Run the agent by itself on one task; is attach() called in its module, and does each call have an agent?"
        )
