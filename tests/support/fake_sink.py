"""A sink that keeps what it is given."""

from __future__ import annotations

from lightning_spans.record.delivery.ended import EndedSpan
from lightning_spans.schema.attempts import Attempt
from lightning_spans.schema.spans import Span


class ListSink:
    def __init__(self) -> None:
        self.taken: list[tuple[Span, Attempt | None]] = []

    @property
    def spans(self) -> list[Span]:
        return [span for span, _ in self.taken]

    def put(self, span: Span | EndedSpan, attempt: Attempt | None) -> None:
        self.taken.append((span if isinstance(span, Span) else span.record(), attempt))

    def flush(self, timeout_s: float) -> bool:
        return True

    def close(self, timeout_s: float = 0.0) -> None:
        pass
