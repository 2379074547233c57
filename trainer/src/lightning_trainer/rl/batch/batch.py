"""Calls and their advantages laid out as training rows, with the account of what became of every call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightning_spans.schema.rewards import Reward
from lightning_trainer.rl.account import Account
from lightning_trainer.rl.advantages import FloatArray
from lightning_trainer.rl.batch.calls import Calls, Judged
from lightning_trainer.rl.batch.comparison import NoContrast
from lightning_trainer.rl.rows import Row, make_rows

if TYPE_CHECKING:
    pass


@dataclass(frozen=True, slots=True)
class Batch:
    """What a batch of rollouts comes to.

    Attributes:
        rows: training rows, those without gradient among them.
        account: what became of every model call.
        agents: number of calls by agent; None stands for calls that nothing names.
        automatic: what automatic rules gave to the attempts that count.
        calls: every call of the attempts that count.
        flat_groups: groups in which there was nothing to compare.
        tied_groups: these, and groups in which only automatic rules, where others gave rewards, or penalties found a
            difference.
        given: all rewards of the attempts that count; those of failures, which nobody gave, among them.
    """

    rows: list[Row]
    account: Account
    agents: Mapping[str | None, int]
    automatic: tuple[Reward, ...] = ()
    calls: tuple[Judged, ...] = ()
    flat_groups: frozenset[str] = frozenset()
    tied_groups: frozenset[str] = frozenset()
    given: tuple[Reward, ...] = ()


def batch_of(calls: Calls, advantages_M: FloatArray, still: NoContrast, *, merge: bool = True) -> Batch:
    """Lay calls out in rows, and draw up the account.

    Args:
        calls: of whole groups.
        advantages_M: (M,) of those that were compared.
        still: groups in which nothing is learned.
        merge: whether calls that continue an earlier one share its row.
    """
    rows, trained = make_rows(calls.transitions, advantages_M, calls.groups, merge=merge)
    judged = [
        Judged(call.transition, call.group_id, call.credit, float(advantage))
        for call, advantage in zip(calls.compared, advantages_M, strict=True)
    ]
    every, account = (*judged, *calls.left_out), calls.account + trained
    return Batch(rows, account, calls.agents, calls.automatic, every, still.flat, still.tied, calls.given)
