"""The calls of attempts that count, each with its share of the rewards."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from lightning_spans.schema.rewards import Reward
from lightning_spans.schema.transitions import Transition
from lightning_trainer.rl.account import Account

FINAL: Final = ""  # the source of everything that no automatic rule gave


@dataclass(frozen=True, slots=True)
class CreditedCall:
    """A call that is compared, with one value for each comparison of its credit."""

    transition: Transition
    group_id: str
    values: tuple[CreditedValue, ...]
    parts: Mapping[str, tuple[float, ...]]  # of each value, by source: an automatic rule's; FINAL: all others'

    @property
    def credit(self) -> float:
        """Its share of the rewards."""
        return self.values[0].value


@dataclass(frozen=True, slots=True)
class CreditedValue:
    """The input of one comparison for a call.

    Attributes:
        value: what is compared.
        place: it is compared only with calls of the same place.
        weight: of this comparison.
        by_step: whether each call counts once; otherwise each attempt does.
    """

    value: float
    place: str
    weight: float
    by_step: bool


@dataclass(frozen=True, slots=True)
class CountedCall:
    """A call of an attempt that counts, and how it was used.

    Attributes:
        transition: the call.
        group_id: the group of its attempt.
        credit: its share of the rewards; NaN if no reward concerns it.
        advantage: how much better than what it was compared with; NaN if it was not compared.
        left_out: why it was not compared; None if it was.
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
        account: the outcomes of the calls that are not compared, including other attempts'.
        agents: number of calls by agent.
        automatic: the automatic rules' rewards for the attempts that count.
        judged: whether anything except automatic rules gave a reward.
        given: all rewards of the attempts that count, including those of failures, which nobody gave.
    """

    compared: tuple[CreditedCall, ...]
    left_out: tuple[CountedCall, ...]
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
