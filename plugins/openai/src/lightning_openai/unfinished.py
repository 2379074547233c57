"""Calls whose answers are still waited for, or read: they end at the latest when recording does."""

from __future__ import annotations

from typing import Final, Protocol


class UnfinishedCall(Protocol):
    """A call with a span that has begun."""

    def end_left(self) -> None:
        """End the span with what was read."""

    def leave(self) -> None:
        """Leave the span to the parent of a forked child: here it counts as ended."""


unfinished: Final[set[UnfinishedCall]] = set()
