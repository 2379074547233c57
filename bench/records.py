"""Spans and calls as a real program makes them, for benchmarks of what comes after the recording."""

from __future__ import annotations

import json

from lightning_spans.schema import spans as names
from lightning_spans.schema.calls import Call, Choice
from lightning_spans.schema.spans import Span

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


def agent_span(number: int, trace: int = 1, parent_id: str | None = None) -> Span:
    """An agent at work: the parent of what it calls."""
    return Span(
        operation=names.INVOKE_AGENT,
        name=f"agent-{number % 3}",
        trace_id=f"{trace:032x}",
        span_id=f"{(1 << 40) + number:016x}",
        parent_id=parent_id,
        start_ns=START_NS + number * 1_000_000 - 1,
        end_ns=START_NS + 10_000_000_000_000,
        status="ok",
        agent=f"agent-{number % 3}",
        rollout_id="r",
        attempt_id="a",
    )


def call_of(span: Span, prompt: int = 120, response: int = 12) -> Call:
    """What the gateway recorded of the same model call."""
    number = int(span.span_id, 16) - 1
    choice = Choice(0, tuple(range(response)), (-0.5,) * response, "stop", {"role": "assistant", "content": "19"})
    return Call(
        call_id=f"call-{number}",
        response_id=f"chatcmpl-{number}",
        start_ns=span.start_ns + 1,
        end_ns=span.end_ns - 1,
        policy="policy",
        policy_version=3,
        trace_id=span.trace_id,
        span_id=span.span_id,
        rollout_id="r",
        attempt_id="a",
        prompt_token_ids=tuple(range(prompt)),
        choices=(choice,),
        request=json.loads(span.attributes[names.REQUEST]),
        sampling={"temperature": 1.0},
    )
