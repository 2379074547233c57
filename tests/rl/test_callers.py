"""A tool is put down to the call of its own agent, also among agents of one name."""

from __future__ import annotations

from lightning_spans.adapter.trace import Trace
from lightning_spans.schema.spans import AGENT_PATH, CHAT, EXECUTE_TOOL, Span
from lightning_trainer.rl.rewards.callers import callers


def span(operation, at, path, *, known=True):
    return Span(
        operation=operation, name="x", trace_id="t", span_id=f"s{at}", start_ns=at, end_ns=at + 1,
        agent=path and path.rpartition("/")[2], rollout_id="r", attempt_id="a",
        attributes={AGENT_PATH: path} if path and known else {},
    )  # fmt: skip


def caller(*spans):
    trace = Trace.build(spans)
    (found,) = callers(trace).values()
    return found.node.span.span_id


CHATS = (span(CHAT, 1, "billing/extract"), span(CHAT, 3, "refund/extract"), span(CHAT, 5, "writer"))


def test_of_namesakes_the_one_called_that_stands_where_the_tool_does():
    assert caller(*CHATS, span(EXECUTE_TOOL, 7, "billing/extract")) == "s1"
    assert caller(*CHATS, span(EXECUTE_TOOL, 7, "refund/extract")) == "s3"


def test_a_name_alone_means_the_last_of_its_namesakes():
    assert caller(*CHATS, span(EXECUTE_TOOL, 7, "extract")) == "s3"
    assert caller(*CHATS, span(EXECUTE_TOOL, 7, "app/billing/extract")) == "s1"
    assert caller(*CHATS, span(EXECUTE_TOOL, 7, None)) == "s5"


def test_a_tool_of_an_agent_that_called_no_model_is_nobodys():
    trace = Trace.build([*CHATS, span(EXECUTE_TOOL, 7, "other/extract")])
    assert callers(trace) == {}
