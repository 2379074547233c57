"""The calls of attempts that count, each with its share of the rewards."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from lightning_spans.schema.rewards import Reward
from lightning_spans.schema.transitions import Transition
from lightning_trainer.rl.account import Account

if TYPE_CHECKING:
    pass

FINAL: Final = ""  # the source that stands for all that no automatic rule gave


@dataclass(frozen=True, slots=True)
class CreditedCall:
    """A call that is compared, with one value for each comparison that its credit asks for."""

    transition: Transition
    group_id: str
    values: tuple[CreditedValue, ...]
    parts: Mapping[str, tuple[float, ...]]  # of each value, by source: that of an automatic rule; FINAL: all others'

    @property
    def credit(self) -> float:
        """Its share of the rewards."""
        return self.values[0].value


@dataclass(frozen=True, slots=True)
class CreditedValue:
    """What one comparison looks at of a call.

    Attributes:
        value: what is compared.
        place: compared with calls of the same place alone.
        weight: of this comparison.
        by_step: whether each call counts by itself; else each attempt counts once.
    """

    value: float
    place: str
    weight: float
    by_step: bool


@dataclass(frozen=True, slots=True)
class Judged:
    """A call of an attempt that counts, and what was made of it.

    Attributes:
        transition: the call.
        group_id: the group of its attempt.
        credit: its share of the rewards; NaN where none concerns it.
        advantage: how much better than what it was compared with; NaN where it was not compared.
        left_out: why it was not compared; None where it was.
    """

    transition: Transition
    group_id: str
    credit: float
    advantage: float = math.nan
    left_out: str | None = None


@dataclass(frozen=True, slots=True)
class Calls:
    """The calls of a batch's attempts that count.

    Attributes:
        compared: (M,) those that are compared.
        left_out: the others, each with the reason.
        account: what became of the calls that are not compared, of other attempts too.
        agents: number of calls by agent.
        automatic: what automatic rules gave to the attempts that count.
        judged: whether anybody but automatic rules gave a reward.
        given: all rewards of the attempts that count; those of failures, which nobody gave, among them.
    """

    compared: tuple[CreditedCall, ...]
    left_out: tuple[Judged, ...]
    account: Account
    agents: Mapping[str | None, int]
    automatic: tuple[Reward, ...]
    judged: bool
    given: tuple[Reward, ...] = ()

    @property
    def transitions(self) -> list[Transition]:
        """(M,) the calls themselves."""
        return [call.transition for call in self.compared]

    @property
    def groups(self) -> dict[str, str]:
        """Return the group of each rollout."""
        return {call.transition.rollout_id: call.group_id for call in self.compared}
