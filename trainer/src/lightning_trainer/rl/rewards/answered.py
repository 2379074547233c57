"""Every model call of an attempt that rules judge: those of the trace, and the answered ones that share a span."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from lightning_spans.adapter.join import node_of_call
from lightning_spans.adapter.trace import Node, Trace
from lightning_spans.chat.body import messages_of


class JudgedCall(NamedTuple):
    """A model call, and where the findings about it go.

    Attributes:
        node: the call, with its request and its answers.
        place: the chat node of its span: of several calls that share a span, the one whose answer the agent reports.
    """

    node: Node
    place: Node

    @property
    def start_ns(self) -> int:
        """When it began, by the clock of the agent."""
        start_ns = self.place.span.start_ns
        if self.node is self.place or self.node.call is None or self.place.call is None:
            return start_ns
        return start_ns + self.node.call.start_ns - self.place.call.start_ns

    @property
    def is_try(self) -> bool:
        """Whether the client made the same call again, and got the other answer."""
        return self.node is not self.place and self.repeats(JudgedCall(self.place, self.place))

    def repeats(self, other: JudgedCall) -> bool:
        """Whether both are tries of one call of a client: they share a span and have the same messages."""
        if self.place is not other.place or self.node.call is None or other.node.call is None:
            return False
        return messages_of(self.node.call.request) == messages_of(other.node.call.request)


def judged_calls(trace: Trace) -> list[JudgedCall]:
    """Return the calls of an attempt, in order.

    A program can make several calls with one ``traceparent`` and report one of them. The gateway answered and recorded
    all of them, so all of them are judged.
    """
    calls = [JudgedCall(node, node) for node in trace.chats]
    return sorted([*calls, *_sharing_calls(trace)], key=lambda judged: judged.start_ns)


def _sharing_calls(trace: Trace) -> Iterator[JudgedCall]:
    spans = {(node.span.trace_id, node.span.span_id): node for node in trace.chats}
    merged = {span_id: node for node in trace.chats for span_id in node.merged}
    for half in trace.lone_calls:
        call = half.call
        if half.node is None and call is not None and call.error is None:
            node, span_id = node_of_call(call, None), call.span_id or ""
            yield JudgedCall(node, spans.get((call.trace_id or "", span_id)) or merged.get(span_id) or node)
