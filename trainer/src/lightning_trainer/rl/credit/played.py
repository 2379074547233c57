"""Attempts for credit assigners that compare several at once: a record, and the forks that left it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from lightning_spans.schema.replays import FORKED
from lightning_spans.schema.transitions import Transition
from lightning_trainer.rl.credit.values import CreditedValues


@dataclass(frozen=True, slots=True)
class Fork:
    """Where an attempt left an earlier one.

    Attributes:
        record: the earlier attempt.
        call: number of the call that was sampled again, from 0: its `Transition.turn` in the record. None: none was.
        without: agents for which another model answered throughout, if `call` is None.
        team: agents for which one did in any of the record's forks, including lost ones.
        weight: of its outcome in an update, if calls are not equally likely to be forked.
    """

    record: str
    call: int | None
    without: frozenset[str] = frozenset()
    team: frozenset[str] = frozenset()
    weight: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedAttempt:
    """An attempt of a step, new or forked, and its outcome.

    Attributes:
        attempt_id: its id.
        transitions: (M,) all of it.
        earned: all its rewards as one number: the team's, not the calling agent's.
        group: the rollouts of its task.
        fork: where it left the record; None for one that began anew.
    """

    attempt_id: str
    transitions: Sequence[Transition]
    earned: float
    group: str = ""
    fork: Fork | None = None

    @property
    def alternative(self) -> int | None:
        """Return the turn of the call that was sampled again; None if there is none."""
        return next((t.turn for t in self.transitions if FORKED in t.sampling), None)


@dataclass(frozen=True, slots=True)
class AcrossAttempts:
    """A credit assigner that compares all attempts of a step, including forks.

    Attributes:
        assign: attempts and keyword options -> for each attempt its values; NaN if a call is not compared.
    """

    assign: Callable[..., list[CreditedValues]]

    across: ClassVar[bool] = True  # for the configuration, one layer below

    def __call__(self, attempts: Sequence[PlayedAttempt], **options: Any) -> list[CreditedValues]:
        """Credit the calls of all attempts."""
        return self.assign(attempts, **options)
