"""How a framework's plugin learns whether the wire saw a call: a watch in the OTel Context, told of each chat span.

A plugin enters `watched(...)` around what may or may not go through the openai client. If its watch was not called by
the end, the model was reached in another way, and the plugin makes the chat span itself. So one call is one span.
"""

from __future__ import annotations

from typing import Final, Protocol, cast

from opentelemetry import context as otel_context
from opentelemetry.context import Context

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
    return otel_context.set_value(_WATCH, watch, context)


def current_watch(context: Context | None = None) -> Watch | None:
    """Give the watch of this context, if any."""
    return cast("Watch | None", otel_context.get_value(_WATCH, context))
