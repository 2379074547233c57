"""Work that a framework reports by its start and its end, with a context that is entered in between.

A scope is notified of the chat spans that start in it. This is how a plugin learns whether a model was called through
the openai client. If none was reported by its end, the model was called in another way, and the plugin creates the
chat span itself. So each call has one span.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from opentelemetry.context import Context

from lightning_spans.record.context import SCOPE, Entry, attach, current, settle_context

if TYPE_CHECKING:
    from lightning_spans.hooks import OpenSpan
    from lightning_spans.schema.spans import Json


class ScopedCall(Protocol):
    """A model call that a framework reports and that has no chat span of the openai client yet."""

    @property
    def named(self) -> bool:
        """Whether a request carries its span's id. Then the span must be ended in any case."""

    def end(
        self,
        answer: Callable[[], Mapping[str, Json] | None] | None = None,
        *,
        error: BaseException | str | None = None,
    ) -> None:
        """Create its span, unless the openai client created one."""

    def name(self, request: Any) -> None:
        """Put its span's id into an HTTP request."""


class Scope(Entry):
    """A period of work.

    It may end in another execution context than it started in, and a copy of its context may outlive it. Both cases are
    resolved by `settle_context`.

    Args:
        here: where it begins; the current context by default.

    Attributes:
        outer: the surrounding scope.
        span: its span; None: it has none.
        seen: whether a chat span began in it.
        call: the model call that it stands for, if it is one.
        error: what went wrong, if that is reported before its end.
    """

    __slots__ = ("call", "error", "outer", "seen", "span")

    def __init__(self, here: Context | None = None) -> None:
        super().__init__()
        self.outer = current_scope(settle_context(here))
        self.span: OpenSpan | None = None
        self.seen = False
        self.call: ScopedCall | None = None
        self.error: BaseException | str | None = None

    def enter(self, context: Context) -> None:
        """Make what follows in this execution context part of the work."""
        # otherwise scopes that ended in other contexts would hold each other in a growing chain
        self.previous = settle_context()
        self.entered = with_scope(self, context)
        attach(self.entered)

    def leave(self) -> None:
        """End the work: restore our previous values, unless another of our scopes is current."""
        self.closed = True
        context = current()
        if context is self.entered:  # the usual case: no context was entered in between
            attach(settle_context(self.previous))
        elif current_scope(context) is self:
            attach(settle_context(context))

    def call_begins(self) -> Context | None:
        """Note that a model or tool is about to be called here; begin the pending span, if there is one.

        Returns:
            The context of that span, as the call's parent; None: the current context is the parent.
        """
        return None

    def call_began(self) -> None:
        """Note that a chat span started here; surrounding scopes are notified too."""
        self.seen = True
        if self.outer is not None:
            self.outer.call_began()


def with_scope(scope: Scope, context: Context | None = None) -> Context:
    """Return a context in which this scope is the innermost."""
    return Context({**(current() if context is None else context), SCOPE: scope})


def current_scope(context: Context | None = None) -> Scope | None:
    """Return the innermost scope of this context, if any; it may have ended."""
    scope = (current() if context is None else context).get(SCOPE)
    return scope if isinstance(scope, Scope) else None


def scopes_around() -> Iterator[Scope]:
    """Return the open scopes around the running code, innermost first."""
    scope = current_scope()
    while scope is not None:
        if not scope.closed:  # it ended in a copy of this context
            yield scope
        scope = scope.outer


def place_of_call() -> Context:
    """Return the context for a model or tool call that is about to begin."""
    scope = current_scope()
    context = None if scope is None else scope.call_begins()
    return settle_context() if context is None else context
