"""What a tracer passes on when a span has ended, and the sink that receives it."""

from __future__ import annotations

from typing import Final, Protocol

from lightning_spans.schema.attempts import Attempt
from lightning_spans.schema.spans import Span

CLOSE_S: Final = 5.0  # at the end of the process, for a destination that does not answer


class EndedSpan(Protocol):
    """A span that has ended and whose record is not made yet."""

    @property
    def trace_id(self) -> str:
        """32 hex digits."""
        ...

    @property
    def unnamed(self) -> bool:
        """Whether a hook must still name its agent, in the delivering thread because it may be slow."""
        ...

    def draft(self) -> Span:
        """Return the record, with the agent known so far."""
        ...

    def record(self) -> Span:
        """Return the record; wait for the hook that names its agent."""
        ...


class Sink(Protocol):
    """Takes finished spans; never blocks, never raises."""

    def put(self, span: Span | EndedSpan, attempt: Attempt | None) -> None:
        """Take a span for delivery."""
        ...

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything so far is delivered, spooled or dropped; False if the time ran out."""
        ...

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Deliver or spool what is pending, and stop. What is not delivered when the time runs out is spooled."""
        ...
