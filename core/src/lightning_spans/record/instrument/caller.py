"""Parts of a program that count as agents if they call a model: a component of a pipeline, a step of a workflow."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from lightning_spans.record.context import settle_context
from lightning_spans.record.instrument.scope import Scope
from lightning_spans.record.recorder import current_span

if TYPE_CHECKING:
    from opentelemetry.context import Context

    from lightning_spans.record.instrument.tracker import Tracker


class CallerScope(Scope):
    """Scope of such a part while it runs. Its span begins with its first model call, because few of them make one."""

    __slots__ = ("_around", "_name", "_tracker")

    def __init__(self, tracker: Tracker, name: str) -> None:
        super().__init__()
        self._tracker = tracker
        self._name = name
        self._around = current_span()

    def call_begins(self) -> Context | None:
        """Begin the part's span, unless another recorded span already surrounds the call."""
        if self.closed or current_span() is not self._around:
            return None
        if self.span is None:
            self.span = self._tracker.begin_agent(self._name)
        return None if self.span is None else self.span.context


@contextmanager
def following(tracker: Tracker, name: str, signals: tuple[str, ...] = ()) -> Iterator[None]:
    """Follow a part that runs in the block.

    Args:
        tracker: of its framework.
        name: of the part, and of its agent if it calls a model.
        signals: names of the framework's exceptions that do not mean that the part failed.
    """
    scope = CallerScope(tracker, name)
    scope.enter(settle_context())
    try:
        yield
    except BaseException as error:
        tracker.end(scope.span, error=None if type(error).__name__ in signals else error)
        raise
    finally:
        scope.leave()
        tracker.end(scope.span)
