"""Spans of other libraries, turned into our schema at the door."""

from __future__ import annotations

from lightning_spans.spans import Span


def adopted(span: Span) -> Span:
    """Give the span in our schema; one that is ours already, or that means nothing here, is given as it is."""
    return span
