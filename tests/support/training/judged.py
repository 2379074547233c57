"""Attempts to be judged, and a judge that prefers the longer answer."""

from __future__ import annotations

import json
import re
from typing import Any

from lightning_conformance.plugins.script import Reply
from lightning_spans.schema.attempts import AttemptRecord, Rollout
from lightning_spans.schema.spans import (
    CHAT,
    REQUEST,
    RESPONSE,
    Span,
)  # fmt: skip
from lightning_spans.store import Store
from lightning_trainer.kits.judging.options import JudgeOptions
from lightning_trainer.rl.rollouts import Outcome

SHARED = [{"role": "system", "content": "You write."}, {"role": "user", "content": "a poem"}]


def options(url: str = "http://127.0.0.1:9/v1", **more: Any) -> JudgeOptions:
    return JudgeOptions(endpoint=url, model="j", retries=1, **more)


def chat(attempt: str, number: int, asked: list[dict[str, Any]], answer: dict[str, Any], agent: str = "writer") -> Span:
    body = {"id": "x", "choices": [{"index": 0, "message": {"role": "assistant", **answer}, "finish_reason": "stop"}]}
    return Span(
        operation=CHAT, name="m", trace_id=f"{hash(attempt) & 0xFFFF:032x}", span_id=f"{number:016x}",
        start_ns=number, end_ns=number + 1, agent=agent, rollout_id=attempt, attempt_id=attempt,
        attributes={REQUEST: json.dumps({"messages": asked}), RESPONSE: json.dumps(body)},
    )  # fmt: skip


def rolled(store: Store, texts: list[str], group: str = "g:0") -> list[Outcome]:
    """Rollouts of one group, each of which answered one text."""
    found = []
    for number, text in enumerate(texts):
        name = f"{group}-{number}"
        store.add_spans([chat(name, number + 1, SHARED, {"content": text})])
        rollout = Rollout(rollout_id=name, group_id=group, task={})
        attempt = AttemptRecord(attempt_id=name, rollout=rollout, number=1, fence=1, worker="w", status="succeeded")
        found.append(Outcome(rollout=rollout, attempt=attempt, attempts=(attempt,)))
    return found


def attempts_told(body: dict[str, Any]) -> list[str]:
    told = next(m["content"] for m in body["messages"] if m["role"] == "user")
    return re.findall(r'<attempt number="\d+">\n(.*?)\n</attempt>', told, re.DOTALL)


def by_length(body: dict[str, Any], seen: int) -> Reply:
    """Longer is better."""
    told = attempts_told(body)
    scores = [{"attempt": n, "explanation": "long", "score": min(1.0, len(t) / 100)} for n, t in enumerate(told, 1)]
    return Reply(text=json.dumps({"scores": scores}))
