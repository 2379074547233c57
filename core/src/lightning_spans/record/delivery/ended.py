"""What a tracer hands over when a span has ended, and to whom."""

from __future__ import annotations

from typing import Final, Protocol

from lightning_spans.schema.attempts import Attempt
from lightning_spans.schema.spans import Span

CLOSE_S: Final = 5.0  # at the end of the process, for a destination that does not answer


class EndedSpan(Protocol):
    """A span that has ended, and whose record is still to be made."""

    @property
    def trace_id(self) -> str:
        """32 hex digits."""
        ...

    @property
    def unnamed(self) -> bool:
        """Whether a hook is still to name its agent, in the thread that delivers: it may be slow."""
        ...

    def draft(self) -> Span:
        """Return the record, with the agent that is known by now."""
        ...

    def record(self) -> Span:
        """Return the record; waits for who names its agent."""
        ...


class Sink(Protocol):
    """Takes finished spans; never blocks, never raises."""

    def put(self, span: Span | EndedSpan, attempt: Attempt | None) -> None:
        """Take a span for delivery."""
        ...

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything put so far is delivered, spooled or dropped; False when the time ran out."""
        ...

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Deliver or spool what is pending, and stop; what is not delivered when the time runs out is spooled."""
        ...
