"""A listener that tells what it heard, once all was told."""

from __future__ import annotations

from lightning_conformance.plugins.script import agent_of
from lightning_spans import hookimpl
from lightning_spans.record.pipeline import live_pipeline
from lightning_spans.schema import spans as names
from lightning_spans.schema.spans import Span


class Listener:
    def __init__(self) -> None:
        self._spans: list[Span] = []

    @hookimpl
    def lightning_span_ended(self, span: Span) -> None:
        self._spans.append(span)

    @property
    def spans(self) -> list[Span]:
        """What ended so far, in order: listeners are told in a thread of their own."""
        live = live_pipeline()
        assert live is None or live.listeners.flush(60.0)
        return self._spans

    def of(self, operation: str) -> list[Span]:
        return [span for span in self.spans if span.operation == operation]

    @property
    def chats(self) -> list[Span]:
        return self.of(names.CHAT)

    @property
    def tools(self) -> list[Span]:
        return self.of(names.EXECUTE_TOOL)

    def above(self, span: Span) -> list[tuple[str, str]]:
        """Operation and name of what is around a span, innermost first."""
        by_id = {known.span_id: known for known in self.spans}
        found = []
        while span.parent_id is not None:
            span = by_id[span.parent_id]
            found.append((span.operation, span.name))
        return found


def check_calls(seen, server, *, names_of=agent_of):
    """Every request is one chat span with the agent that made it and the response's id, and nothing is an orphan."""
    spans = {span.span_id: span for span in seen.chats}
    assert len(spans) == len(server.requests) > 0
    for request in server.requests:
        span = spans[request.headers["traceparent"].split("-")[2]]
        assert span.agent == names_of(request.body)
        assert span.attributes.get(names.RESPONSE_ID) == request.answer.get("id")
    known = {span.span_id for span in seen.spans}
    assert all(span.parent_id is None or span.parent_id in known for span in seen.spans)
