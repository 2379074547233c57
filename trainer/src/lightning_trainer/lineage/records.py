"""Looks up an id in a store, to tell a mistyped id from one that no checkpoint learned from."""

from __future__ import annotations

from lightning_spans.schema.attempts import AttemptRecord, Rollout
from lightning_spans.schema.calls import Call
from lightning_spans.schema.rewards import Reward
from lightning_spans.schema.spans import Span
from lightning_spans.store import Store
from lightning_spans.store.protocol import Where, each
from lightning_spans.store.traces import each_trace
from lightning_trainer.lineage.permits import tenants_of


def has_record(store: Store, what: str) -> bool:
    """Whether a store has a call, trace, rollout, attempt or reward with this id, or a trace of this tenant."""
    named: tuple[tuple[type[Call | Span | Rollout | AttemptRecord], Where], ...] = (
        (Call, Where(call_ids=[what])),
        (Call, Where(trace_ids=[what])),
        (Span, Where(trace_ids=[what])),
        (Rollout, Where(rollout_ids=[what])),
        (AttemptRecord, Where(attempt_ids=[what])),
    )
    if any(store.page(kind, where, limit=1).records for kind, where in named):
        return True
    if any(reward.reward_id == what for reward in each(store, Reward)):
        return True
    return any(what in tenants_of(trace) for trace in each_trace(store))
