"""How a framework's plugin learns whether the wire saw a call: a watch in the OTel Context, told of each chat span.

A plugin enters `watched(...)` around what may or may not go through the openai client. If its watch was not called by
the end, the model was reached in another way, and the plugin makes the chat span itself. So one call is one span.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

from opentelemetry.context import Context

from lightning_spans.context import attach, current, overlaid
from lightning_spans.recorder import current_span

if TYPE_CHECKING:
    from lightning_openai.elsewhere import OtherCall

_WATCH: Final = "lightning-watch"


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
    return Context({**(current() if context is None else context), _WATCH: watch})


def current_watch(context: Context | None = None) -> Watch | None:
    """Give the watch of this context, if any."""
    watch: Any = (current() if context is None else context).get(_WATCH)
    return watch  # type: ignore[no-any-return]


class Stay:
    """A stretch of work that a framework reports by its start and its end, with the context entered in between.

    It is a watch itself: `seen` says whether the wire made a chat span in it. Its end may come in another execution
    context than its start, and a copy of its context may outlive it; both then find their way out.
    """

    __slots__ = ("call", "closed", "entered", "outer", "previous", "seen")

    def __init__(self, here: Context | None = None) -> None:
        self.outer = current_watch(here)
        self.previous: Context | None = None
        self.entered: Context | None = None
        self.closed = False
        self.seen = False
        self.call: OtherCall | None = None  # told of the HTTP requests in here

    def enter(self, context: Context) -> None:
        """Make what follows in this execution context part of the work."""
        self.previous = current()
        self.entered = watched(self, context)
        attach(self.entered)

    def leave(self) -> None:
        """End the work: give back our values that were there before, unless something else of ours is current."""
        self.closed = True
        context = current()
        if context is self.entered:  # as nearly always: nobody put anything on top
            attach(settled(self.previous))
        elif self.over(context):
            attach(settled(context))

    def called(self) -> None:
        """The wire began a chat span in here; what is around is told too."""
        self.seen = True
        if self.outer is not None:
            self.outer.called()

    def outside(self) -> Context | None:
        """Give the context around this work, if the current one outlived it."""
        context = current()
        return settled(context) if self.over(context) else None

    def over(self, context: Context) -> bool:
        """Whether a context is still the one of this work, which has ended."""
        if not self.closed or self.entered is None or current_watch(context) is not self:
            return False
        return current_span(context) is current_span(self.entered)


def settled(context: Context | None = None) -> Context:
    """Give the innermost context whose work is not over; everybody else's values in it stay as they are."""
    context = current() if context is None else context
    stay = current_watch(context)
    if not isinstance(stay, Stay) or not stay.closed:  # as nearly always
        return context
    found, alone = context, True
    while isinstance(stay := current_watch(found), Stay) and stay.over(found):
        alone = alone and found is stay.entered  # nobody put anything on top, so nothing is to be kept
        found = stay.previous or Context()
    return found if alone else overlaid(found, context)
