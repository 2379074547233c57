"""What an attempt has on record."""

from __future__ import annotations

from lightning_spans.schema.attempts import AttemptRecord
from lightning_spans.schema.json import to_json
from lightning_spans.schema.rewards import Reward
from lightning_spans.schema.spans import CHAT, Span


def reward_of(attempt: AttemptRecord, **changes) -> dict:
    return to_json(
        Reward(**{"rollout_id": attempt.rollout.rollout_id, "attempt_id": attempt.attempt_id, "value": 1.0, **changes})
    )


def span_of(attempt_id: str | None, **changes) -> Span:
    values = {"operation": CHAT, "name": "chat", "trace_id": "a" * 32, "span_id": "b" * 16, "parent_id": None}
    return Span(**{**values, "start_ns": 1, "end_ns": 2, "status": "ok", "attempt_id": attempt_id, **changes})
