"""Stretches of work that a framework reports by their start and their end, with the context entered in between.

Each is a watch as well: it is told of the chat spans that begin in it. That is how a plugin learns whether a model was
called through the openai client. If its watch was not told by the end, the model was reached in another way, and the
plugin makes the chat span itself. So one call is one span.
"""

from __future__ import annotations

from typing import Any, Protocol

from opentelemetry.context import Context

from lightning_spans.context import WATCH, attach, current, settled


class Watch(Protocol):
    """Told of the chat spans that the wire begins under it."""

    def called(self) -> None:
        """A chat span began."""

    def outside(self) -> Context | None:
        """Give the context to go back to when what was watched is over; None while it lasts.

        Callbacks that end things run in contexts of their own (asyncio shields them), so a context may outlive what it
        stands for.
        """


def watched(watch: Watch, context: Context | None = None) -> Context:
    """Give a context in which this watch is told."""
    return Context({**(current() if context is None else context), WATCH: watch})


def current_watch(context: Context | None = None) -> Watch | None:
    """Give the watch of this context, if any."""
    watch: Any = (current() if context is None else context).get(WATCH)
    return watch  # type: ignore[no-any-return]


class Stay:
    """A stretch of work.

    Its end may come in another execution context than its start, and a copy of its context may outlive it; both then
    find their way out (`settled`).

    Args:
        here: where it begins; the current context by default.

    Attributes:
        outer: the watch around it.
        previous: the context that was current before it was entered.
        entered: the context that it was entered with; None before.
        closed: whether it is over.
        seen: whether the wire made a chat span in it.
        call: what is told of the HTTP requests in here: an `OtherCall` of the wire's.
    """

    __slots__ = ("call", "closed", "entered", "outer", "previous", "seen")

    def __init__(self, here: Context | None = None) -> None:
        self.outer = current_watch(settled(here))
        self.previous: Context | None = None
        self.entered: Context | None = None
        self.closed = False
        self.seen = False
        self.call: Any = None

    def enter(self, context: Context) -> None:
        """Make what follows in this execution context part of the work."""
        self.previous = settled()  # else works that ended elsewhere would hold each other, in an ever longer chain
        self.entered = watched(self, context)
        attach(self.entered)

    def leave(self) -> None:
        """End the work: give back our values that were there before, unless another work of ours is current."""
        self.closed = True
        context = current()
        if context is self.entered:  # as nearly always: nobody put anything on top
            attach(settled(self.previous))
        elif current_watch(context) is self:
            attach(settled(context))

    def called(self) -> None:
        """The wire began a chat span in here; what is around is told too."""
        self.seen = True
        if self.outer is not None:
            self.outer.called()

    def outside(self) -> Context | None:
        """Give the context around this work, if the current one outlived it."""
        context = current()
        around = settled(context)
        return None if around is context else around
