"""Stretches of work that a framework reports by their start and their end, with the context entered in between.

A scope is told of the chat spans that begin in it. That is how a plugin learns whether a model was called through the
openai client. If the scope was not told by the end, the model was reached in another way, and the plugin makes the chat
span itself. So one call is one span.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from opentelemetry.context import Context

from lightning_spans.record.context import SCOPE, Entry, attach, current, settled

if TYPE_CHECKING:
    from lightning_spans.hooks import OpenSpan
    from lightning_spans.schema.spans import Json


class ScopedCall(Protocol):
    """A model call that a framework reports, and that is no chat span of the openai client's yet."""

    @property
    def named(self) -> bool:
        """Whether a request has named its span, which is then to be ended in any case."""

    def end(
        self,
        answer: Callable[[], Mapping[str, Json] | None] | None = None,
        *,
        error: BaseException | str | None = None,
    ) -> None:
        """Make its span, unless the openai client made one."""

    def name(self, request: Any) -> None:
        """Name its span in an HTTP request."""


class Scope(Entry):
    """A stretch of work.

    Its end may come in another execution context than its start, and a copy of its context may outlive it; both then
    find their way out (`settled`).

    Args:
        here: where it begins; the current context by default.

    Attributes:
        outer: the scope around it.
        span: what it is recorded as; None: it has no span of its own.
        seen: whether a chat span began in it.
        call: the model call that it stands for, if it is one.
        error: what went wrong, where that is told before its end.
    """

    __slots__ = ("call", "error", "outer", "seen", "span")

    def __init__(self, here: Context | None = None) -> None:
        super().__init__()
        self.outer = current_scope(settled(here))
        self.span: OpenSpan | None = None
        self.seen = False
        self.call: ScopedCall | None = None
        self.error: BaseException | str | None = None

    def enter(self, context: Context) -> None:
        """Make what follows in this execution context part of the work."""
        self.previous = settled()  # else scopes that ended in other contexts would hold each other, in a longer chain
        self.entered = scoped(self, context)
        attach(self.entered)

    def leave(self) -> None:
        """End the work: give back our values that were there before, unless another scope of ours is current."""
        self.closed = True
        context = current()
        if context is self.entered:  # as nearly always: nobody put anything on top
            attach(settled(self.previous))
        elif current_scope(context) is self:
            attach(settled(context))

    def call_begins(self) -> Context | None:
        """Be told that a model or tool is about to be called in here; begin the span that waited for it, if one did.

        Returns:
            The context of that span, which the call is under; None: the current context is the call's.
        """
        return None

    def call_began(self) -> None:
        """Be told that a chat span began in here; what is around is told too."""
        self.seen = True
        if self.outer is not None:
            self.outer.call_began()


def scoped(scope: Scope, context: Context | None = None) -> Context:
    """Return a context in which this scope is the innermost."""
    return Context({**(current() if context is None else context), SCOPE: scope})


def current_scope(context: Context | None = None) -> Scope | None:
    """Return the innermost scope of this context, if any; it may be over."""
    scope = (current() if context is None else context).get(SCOPE)
    return scope if isinstance(scope, Scope) else None


def scopes_around() -> Iterator[Scope]:
    """Return the scopes around what runs here, innermost first; some may be over."""
    scope = current_scope()
    while scope is not None:
        yield scope
        scope = scope.outer


def place_of_call() -> Context:
    """Return the context for a model or tool call that is about to begin."""
    scope = current_scope()
    context = None if scope is None else scope.call_begins()
    return settled() if context is None else context
