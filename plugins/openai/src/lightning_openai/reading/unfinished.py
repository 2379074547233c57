"""Calls whose answers are still awaited or read. They end with recording at the latest."""

from __future__ import annotations

from typing import Final, Protocol


class UnfinishedCall(Protocol):
    """A call with a span that has begun."""

    def end_left(self) -> None:
        """End the span with what was read."""

    def leave(self) -> None:
        """Leave the span to the parent of a forked child. In the child it counts as ended."""


unfinished: Final[set[UnfinishedCall]] = set()
