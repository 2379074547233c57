"""Arranges calls and their advantages as training rows, with the account of every call's outcome."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_spans.schema.rewards import Reward
from lightning_trainer.rl.account import Account
from lightning_trainer.rl.advantages import FloatArray
from lightning_trainer.rl.batch.calls import Calls, CountedCall
from lightning_trainer.rl.batch.comparison import NoContrast
from lightning_trainer.rl.rows import Row, make_rows


@dataclass(frozen=True, slots=True)
class Batch:
    """The training data of a batch of rollouts.

    Attributes:
        rows: training rows, including those without gradient.
        account: the outcome of every model call.
        agents: number of calls by agent; None stands for calls that nothing names.
        automatic: the automatic rules' rewards for the attempts that count.
        calls: every call of the attempts that count.
        flat_groups: groups in which there was nothing to compare, including replaced ones.
        tied_groups: these, and groups in which only penalties, or automatic rules next to other rewards, made a
            difference.
        given: all rewards of the attempts that count, including those of failures, which nobody gave.
        replaced_groups: groups that were compared, then replaced by others: `with_contrast`.
    """

    rows: list[Row]
    account: Account
    agents: Mapping[str | None, int]
    automatic: tuple[Reward, ...] = ()
    calls: tuple[CountedCall, ...] = ()
    flat_groups: frozenset[str] = frozenset()
    tied_groups: frozenset[str] = frozenset()
    given: tuple[Reward, ...] = ()
    replaced_groups: frozenset[str] = frozenset()

    @property
    def compared_groups(self) -> frozenset[str]:
        """Groups that were compared, including replaced ones."""
        return self.replaced_groups | {call.group_id for call in self.calls if call.left_out is None}


def batch_of(calls: Calls, advantages_M: FloatArray, still: NoContrast | None, *, merge: bool = True) -> Batch:
    """Arrange calls in rows, and create the account.

    Args:
        calls: of whole groups.
        advantages_M: (M,) of those that were compared.
        still: groups in which nothing is learned; None: advantages are made from these numbers later, so 0 is a number
            like others.
        merge: whether calls that continue an earlier one share its row.
    """
    rows, trained = make_rows(calls.transitions, advantages_M, calls.groups, merge=merge)
    if still is None:
        trained, still = replace(trained, rows_without_gradient=0), NoContrast(frozenset(), frozenset())
    judged = [
        CountedCall(call.transition, call.group_id, call.credit, float(advantage))
        for call, advantage in zip(calls.compared, advantages_M, strict=True)
    ]
    every, account = (*judged, *calls.left_out), calls.account + trained
    return Batch(rows, account, calls.agents, calls.automatic, every, still.flat, still.tied, calls.given)


def join_batches(batches: Sequence[Batch]) -> Batch:
    """Return the batches of different groups as one."""
    agents: Counter[str | None] = Counter()
    for batch in batches:
        agents.update(batch.agents)
    return Batch(
        rows=[row for batch in batches for row in batch.rows],
        account=sum((batch.account for batch in batches), Account()),
        agents=agents,
        automatic=tuple(reward for batch in batches for reward in batch.automatic),
        calls=tuple(call for batch in batches for call in batch.calls),
        flat_groups=frozenset[str]().union(*(batch.flat_groups for batch in batches)),
        tied_groups=frozenset[str]().union(*(batch.tied_groups for batch in batches)),
        given=tuple(reward for batch in batches for reward in batch.given),
    )
