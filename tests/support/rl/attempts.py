"""One agent's attempt with tool calls, put together turn by turn."""

from __future__ import annotations

import json

import pytest

from lightning_spans.adapter.trace import Trace
from lightning_spans.schema.spans import (
    CHAT,
    EXECUTE_TOOL,
    REQUEST,
    RESPONSE,
    TOOL_CALL_ID,
    TOOL_RESULT,
    Span,
)
from lightning_trainer.rl.rewards.judge import judge, read_rules

ADD = {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}
CHAT_TOOLS = [{"type": "function", "function": {"name": "add", "parameters": ADD}}]


class Attempt:
    """Spans made by hand, in the order of their making, one after the other."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def span(self, operation, agent, *, status="ok", **attributes):
        number = len(self.spans) + 1
        self.spans.append(
            Span(
                operation=operation, name=operation, trace_id="a" * 32, span_id=f"{number:016x}", agent=agent,
                start_ns=number * 10, end_ns=number * 10 + 5, status=status, rollout_id="r", attempt_id="at",
                attributes=attributes,
            )
        )  # fmt: skip
        return self

    def chat(self, agent, *calls, text=None, tools=CHAT_TOOLS, **attributes):
        """A model call that asked for tools: (name, arguments, id)."""
        asked = [{"id": i, "type": "function", "function": {"name": n, "arguments": a}} for n, a, i in calls]
        message = {"role": "assistant", "content": text, **({"tool_calls": asked} if asked else {})}
        body = {"id": f"c{len(self.spans)}", "choices": [{"index": 0, "message": message}]}
        request = {"messages": [], "tools": tools}
        return self.span(CHAT, agent, **{REQUEST: json.dumps(request), RESPONSE: json.dumps(body)}, **attributes)

    def tool(self, agent, call_id=None, *, status="ok", result="3"):
        named = {} if call_id is None else {TOOL_CALL_ID: call_id}
        return self.span(EXECUTE_TOOL, agent, status=status, **{TOOL_RESULT: result}, **named)

    @property
    def trace(self):
        return Trace.build(self.spans, (), ())


def found(attempt, name, value=1.0, **options):
    """What a rule gives, by agent and number of the span."""
    (chosen,) = read_rules({name: value}, **options)
    return {
        (r.agent, r.span_id and int(r.span_id, 16)): pytest.approx(r.value)
        for r in judge(chosen, attempt.trace, "r", "at")
    }
