"""The costs of a method, read from its run: tokens of model calls on training tasks, and trained tokens."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lightning_spans.store.traces import traces_of
from lightning_trainer.report.log.lines import read
from lightning_trainer.report.metrics import LOG_NAME
from lightning_trainer.rl.usage import is_replayed, tokens_of
from lightning_trainer.session.session import STORE_NAME, open_database

_AT_ONCE: Final = 64  # traces in memory
_STEP: Final = re.compile(r"(.*):t(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """The costs of a run.

    Attributes:
        rollouts: rollouts on training tasks.
        sampled: tokens of all their model calls, prompts and answers.
        trained: tokens of the rows that updates computed, counted once per pass.
    """

    rollouts: int = 0
    sampled: int = 0
    trained: int = 0

    @property
    def tokens(self) -> int:
        """The tokens that count towards the budget."""
        return self.sampled + self.trained

    def __add__(self, other: Costs) -> Costs:
        """Return the sum."""
        return Costs(
            rollouts=self.rollouts + other.rollouts,
            sampled=self.sampled + other.sampled,
            trained=self.trained + other.trained,
        )


def costs_of(run: Path, passes: int = 1) -> Costs:
    """Return the costs of a run; zero if there is no run.

    A call that a fork replays from its record was sampled once and counts once. Rollouts that an interrupted process
    sampled after its last checkpoint are sampled again, and also count once.

    Args:
        run: its folder.
        passes: passes over each batch.
    """
    if not (run / STORE_NAME).exists():
        return Costs()
    lines = [line for line in read(run / LOG_NAME) if line["kind"] == "train"]
    trained = sum(round(line.get("packed_tokens", 0.0)) for line in lines) * passes
    rollouts, sampled = _count_sampled(run / STORE_NAME)
    return Costs(rollouts=rollouts, sampled=sampled, trained=trained)


def _count_sampled(store: Path) -> tuple[int, int]:
    with open_database(str(store)) as kept:
        ids = learned_from([rollout.rollout_id for rollout in kept.rollouts()])
        tokens = 0
        for first in range(0, len(ids), _AT_ONCE):
            for trace in traces_of(kept, rollout_ids=ids[first : first + _AT_ONCE]):
                tokens += sum(sum(tokens_of(node)) for node in trace.chats if not is_replayed(node))
    return len(ids), tokens


def learned_from(rollout_ids: Sequence[str]) -> list[str]:
    """Return the rollouts without those that a resumed process samples again after an interruption.

    Args:
        rollout_ids: in the order in which they were queued: the process's name, ``:t``, the step or round, and more.
    """
    kept: list[tuple[str, int | None]] = []
    life = ""
    for rollout_id in rollout_ids:
        match = _STEP.match(rollout_id)
        if match is None:
            kept.append((rollout_id, None))
            continue
        step = int(match[2])
        if match[1] != life:
            life = match[1]
            kept = [(name, its) for name, its in kept if its is None or its < step]
        kept.append((rollout_id, step))
    return [name for name, _ in kept]
