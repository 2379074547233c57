"""The agent that chaos kills: two model calls, their spans through the sink and its spool, and a reward.

Whatever it was told is kept, it writes into a file of its own, so that the driver can ask for it later.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import time
from typing import Any

import httpx

from lightning_spans.record.context import current_attempt
from lightning_spans.record.delivery.deliver import Delivery, Destination
from lightning_spans.record.delivery.outbox import Spool, default_spool
from lightning_spans.record.delivery.sink import BatchSink
from lightning_spans.schema.attempts import Attempt
from lightning_spans.schema.spans import CHAT, RESPONSE_ID, Span
from lightning_spans.store import open_store


def _route(attempt: Attempt | None) -> list[Destination]:
    assert attempt is not None
    return [Destination(f"{attempt.endpoint}/v1/traces", attempt.key)]


SINK = BatchSink(Delivery(lambda: open_store("never.db")), route=_route, spool=Spool(default_spool()))
CLIENTS: dict[asyncio.AbstractEventLoop, httpx.AsyncClient] = {}
FILE = os.open(os.environ["CHAOS_ACKS"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def _note(*words: str) -> None:
    os.write(FILE, (" ".join(words) + "\n").encode())


async def run(task: dict[str, Any]) -> float:
    loop = asyncio.get_running_loop()
    client = CLIENTS.setdefault(loop, CLIENTS.get(loop) or httpx.AsyncClient(timeout=10.0, trust_env=False))
    attempt = current_attempt()
    assert attempt is not None
    trace, text, spans = f"{random.getrandbits(128):032x}", str(task["question"]), []
    for _ in range(2):
        span, began = f"{random.getrandbits(64):016x}", time.time_ns()
        answer = await client.post(
            f"{attempt.endpoint}/v1/chat/completions",
            json={"model": attempt.model, "messages": [{"role": "user", "content": text}]},
            headers={"authorization": f"Bearer {attempt.key}", "traceparent": f"00-{trace}-{span}-01"},
        )
        answer.raise_for_status()
        body = answer.json()
        _note("call", attempt.attempt_id, body["id"])
        text = body["choices"][0]["message"]["content"]
        record = Span(
            operation=CHAT, name="policy", agent="writer", trace_id=trace, span_id=span, start_ns=began,
            end_ns=time.time_ns(), rollout_id=attempt.rollout_id, attempt_id=attempt.attempt_id,
            attributes={RESPONSE_ID: body["id"]},
        )  # fmt: skip
        SINK.put(record, attempt)
        spans.append(span)
    if await asyncio.to_thread(SINK.flush, 10.0):
        for span in spans:
            _note("span", trace, span)
    return hashlib.sha256(text.encode()).digest()[0] % 5 / 4
