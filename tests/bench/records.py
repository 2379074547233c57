"""Spans and calls as a real program makes them, for benchmarks of what comes after the recording."""

from __future__ import annotations

import json

from lightning_spans import spans as names
from lightning_spans.spans import Span

SYSTEM = "You are a careful assistant. Use the tools you are given, then answer in one line. " * 4
START_NS = 1_790_000_000_000_000_000


def chat_span(number: int, trace: int = 1, parent_id: str | None = None, attempt: str | None = "a") -> Span:
    """A model call: request and reply of about 1.5 KB together, as the wire records them."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"What is {number} + 7?"}]
    request = {"model": "policy", "messages": messages, "temperature": 1.0, "max_tokens": 64}
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "Answer: 19"}}
    reply = {"id": f"chatcmpl-{number}", "model": "policy", "object": "chat.completion", "choices": [choice]}
    return Span(
        operation=names.CHAT,
        name="chat policy",
        trace_id=f"{trace:032x}",
        span_id=f"{number + 1:016x}",
        parent_id=parent_id,
        start_ns=START_NS + number * 1_000_000,
        end_ns=START_NS + number * 1_000_000 + 800_000,
        status="ok",
        agent=f"agent-{number % 3}",
        rollout_id="r" if attempt else None,
        attempt_id=attempt,
        attributes={
            names.REQUEST_MODEL: "policy",
            names.RESPONSE_MODEL: "policy",
            names.RESPONSE_ID: f"chatcmpl-{number}",
            names.PROVIDER: "openai",
            names.REQUEST_TEMPERATURE: 1.0,
            names.FINISH_REASONS: ["stop"],
            names.INPUT_TOKENS: 120,
            names.OUTPUT_TOKENS: 12,
            names.ENDPOINT: "/chat/completions",
            names.REQUEST: json.dumps(request),
            names.RESPONSE: json.dumps(reply),
        },
    )
