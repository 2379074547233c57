"""What is watched of a step, counted from traces, groups and rows that were made up."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lightning_spans.adapter.trace import Trace
from lightning_spans.schema.calls import Call, Choice
from lightning_spans.schema.spans import CHAT, EXECUTE_TOOL, TOOL_NAME, Span
from lightning_trainer.report.step_metrics import of_groups, of_rows, of_traces
from lightning_trainer.rl.rows import Row


def span(number: int, operation: str, *, agent: str | None = None, status: str = "ok", **attributes: str) -> Span:
    return Span(
        trace_id=f"{1:032x}",
        span_id=f"{number:016x}",
        parent_id=None,
        operation=operation,
        name=operation,
        agent=agent,
        start_ns=number * 10,
        end_ns=number * 10 + 5,
        status=status,  # type: ignore[arg-type]
        attributes=dict(attributes),
    )


def call(number: int, tokens: int, finish: str = "stop") -> Call:
    choice = Choice(0, tuple(range(tokens)), (-1.0,) * tokens, finish, {})
    return Call(
        call_id=f"c{number}",
        response_id=f"r{number}",
        start_ns=number * 10,
        end_ns=number * 10 + 5,
        policy="p",
        policy_version=0,
        trace_id=f"{1:032x}",
        span_id=f"{number:016x}",
        prompt_token_ids=(1, 2, 3),
        choices=(choice,),
    )


def trace() -> Trace:
    spans = [
        span(1, CHAT, agent="writer"),
        span(2, EXECUTE_TOOL, agent="writer", status="error", **{TOOL_NAME: "search"}),
        span(3, EXECUTE_TOOL, agent="writer", **{TOOL_NAME: "search"}),
        span(4, CHAT, agent="rewriter"),
        span(5, CHAT, agent="writer"),
    ]
    return Trace.build(spans, [call(1, 4), call(4, 10, "length"), call(5, 6)])


def test_lengths_and_tools_are_told_by_agent_and_tool() -> None:
    found = of_traces([trace(), trace()])
    assert found == pytest.approx(
        {
            "calls_per_rollout": 3.0,
            "calls_per_rollout/writer": 2.0,
            "calls_per_rollout/rewriter": 1.0,
            "response_tokens": 20 / 3,
            "response_tokens/writer": 5.0,
            "response_tokens/rewriter": 10.0,
            "truncated": 1 / 3,
            "truncated/writer": 0.0,
            "truncated/rewriter": 1.0,
            "tool_calls": 4.0,
            "tool_calls/search": 4.0,
            "tool_error_rate": 0.5,
            "tool_error_rate/search": 0.5,
            "tokens_prompt": 18.0,
            "tokens_generated": 40.0,
        }
    )


def test_what_never_happened_has_no_rate() -> None:
    assert of_traces([]) == {"tool_calls": 0.0, "tokens_prompt": 0.0, "tokens_generated": 0.0}
    assert of_groups(0, 0) == {"groups": 0.0}
    assert of_rows([], {"p": 1}) == {}


def test_groups_without_signal_are_a_share_of_those_compared() -> None:
    assert of_groups(8, 6) == {"groups": 8.0, "groups_without_signal": 0.75}


def test_staleness_counts_updates_of_the_rows_own_policy() -> None:
    row = Row(
        tokens=np.array([1, 2], np.int32),
        mask=np.array([False, True]),
        logprobs=np.zeros(2, np.float32),
        advantages=np.zeros(2),
        lengths=(1,),
        agent="writer",
        attempt_id="a",
        rollout_id="r",
        group_id="g",
        policy="writer",
        policy_version=3,
    )
    rows = [row, replace(row, policy="team", policy_version=1), replace(row, policy_version=-1)]
    assert of_rows(rows, {"writer": 3, "team": 5}) == {"staleness": 2.0, "staleness_max": 4.0}
