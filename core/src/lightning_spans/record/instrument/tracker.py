"""What a plugin keeps while it follows a framework: its open spans and scopes, with what went wrong inside.

`Tracker` is for work that a call of the framework encloses, `EventTracker` for work that is reported by its start and
its end.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator, Callable, Generator, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from lightning_spans.record.context import current_agent, entered, entered_iteration, entered_steps
from lightning_spans.record.instrument.scope import Scope
from lightning_spans.record.recorder import current_span, log_failure
from lightning_spans.schema import spans as names

if TYPE_CHECKING:
    from opentelemetry.context import Context

    from lightning_spans.hooks import OpenSpan, Recorder
    from lightning_spans.schema.spans import Json

T = TypeVar("T")
S = TypeVar("S", bound=Scope)


class Tracker:
    """The open spans of one framework. A span that could not be begun is None, which every method takes.

    Args:
        recorder: takes the spans.
        framework: the plugin's name, on every span.

    Attributes:
        plugin: the package that follows, for what is logged.
        live: whether anything is recorded still; wrappers outlive the detaching where somebody patched after us.
    """

    def __init__(self, recorder: Recorder, framework: str) -> None:
        self.recorder = recorder
        self.framework = framework
        self.plugin = f"lightning_{framework.replace('-', '_')}"
        self.live = True
        self._open: dict[str, OpenSpan] = {}  # by span id

    def stop(self) -> None:
        """End what is open, and begin nothing more."""
        self.live = False
        for span in reversed(list(self._open.values())):
            self.end(span)

    def guard(self, span: OpenSpan | None = None) -> AbstractContextManager[None]:
        """Log what goes wrong inside the block instead of raising it into the agent."""
        return self.recorder.guard(self.plugin, span)

    def begin_agent(self, name: str, context: Context | None = None, *, by_default: bool = False) -> OpenSpan | None:
        """Begin the span of an agent that gets to work.

        Args:
            name: of the agent.
            context: where it begins; the current context by default.
            by_default: the name is what the framework calls an agent without one. Where `agent()`, or another
                framework, says who is at work, that stays the agent, and there is no span.
        """
        if by_default and self._is_named_around(context):
            return None
        return self.begin(names.INVOKE_AGENT, name, agent=name, context=context)

    def _is_named_around(self, context: Context | None) -> bool:
        around: Any = current_span(context)
        while around is not None and around.operation == names.INVOKE_WORKFLOW:
            around = around.parent
        if around is None:  # a process that was started for an agent, or an `agent()` that could not be recorded
            return current_agent(context) is not None
        own = around.attributes.get(names.FRAMEWORK) == self.framework
        return bool(around.operation == names.INVOKE_AGENT and not own)

    def begin_tool(
        self,
        name: str,
        call_id: str | None,
        arguments: str,
        context: Context | None = None,
        *,
        agent: str | None = None,
    ) -> OpenSpan | None:
        """Begin the span of a tool call; `arguments` is JSON text. Its agent is the context's where none is given."""
        facts = {names.TOOL_NAME: name, names.TOOL_CALL_ID: call_id, names.TOOL_ARGUMENTS: arguments}
        return self.begin(names.EXECUTE_TOOL, name, agent=agent, context=context, attributes=facts)

    def begin(
        self,
        operation: str,
        name: str,
        *,
        agent: str | None = None,
        context: Context | None = None,
        attributes: Mapping[str, Json] | None = None,
        start_ns: int | None = None,
    ) -> OpenSpan | None:
        """Begin a span; None when nothing is recorded any more, or it could not be begun, which is logged.

        Args:
            operation: ``invoke_agent``, ``execute_tool``, ``invoke_workflow``.
            name: what a viewer shows.
            agent: who is at work in it; the agent of the context where None.
            context: where it begins; the current context by default.
            attributes: None values are left out.
            start_ns: Unix time in nanoseconds; now by default.
        """
        if not self.live:
            return None
        try:  # no `guard`, which costs four calls
            known = {names.FRAMEWORK: self.framework, **(attributes or {})}
            who = current_agent(context) if agent is None else agent
            span = self.recorder.start(operation, name, agent=who, context=context, attributes=known, start_ns=start_ns)
        except Exception as error:  # noqa: BLE001 - logged
            log_failure(self.plugin, error)
            return None
        self._open[span.span_id] = span
        return span

    def end(
        self,
        span: OpenSpan | None,
        *,
        error: BaseException | str | None = None,
        attributes: Mapping[str, Json] | None = None,
        end_ns: int | None = None,
    ) -> None:
        """End a span, now or at a Unix time in nanoseconds; the second end of one changes nothing."""
        if span is not None:
            self._open.pop(span.span_id, None)
            if span.end_ns is None:
                try:
                    span.end(error=error, attributes=attributes, end_ns=end_ns)
                except Exception as raised:  # noqa: BLE001 - logged
                    log_failure(self.plugin, raised, span)

    @contextmanager
    def working(self, span: OpenSpan | None) -> Iterator[None]:
        """End the span with the block, as failed if that raised, and as abandoned if it is a generator left alone."""
        try:
            yield
        except GeneratorExit:
            self.end(span, attributes={names.ABANDONED: True})
            raise
        except BaseException as error:
            self.end(span, error=error)
            raise
        finally:
            self.end(span)

    @contextmanager
    def inside(self, span: OpenSpan | None) -> Iterator[None]:
        """As `working`, with the span entered, so that what the block calls is under it. For generators: `steps`."""
        with self.working(span), nullcontext() if span is None else entered(span.context):
            yield

    async def steps(self, span: OpenSpan | None, items: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
        """Return the items of a generator that works under the span; what their reader does in between is not."""
        with self.working(span):
            inner = items if span is None else entered_steps(span.context, items)
            try:
                async for item in inner:
                    yield item
            finally:
                await inner.aclose()

    def iterate(self, span: OpenSpan | None, items: Generator[T, None, None]) -> Generator[T, None, None]:
        """As `steps`, of a generator that is not asynchronous."""
        with self.working(span):
            inner = items if span is None else entered_iteration(span.context, items)
            try:
                for item in inner:  # noqa: UP028 - `yield from` would close it before its span is told
                    yield item
            except GeneratorExit:  # closing it may raise
                self.end(span, attributes={names.ABANDONED: True})
                raise
            finally:
                inner.close()


class EventTracker(Tracker, Generic[S]):
    """A tracker of work that is reported by its start and its end, each in a call of its own.

    Attributes:
        scopes: what has started and not ended, by a key of the plugin's, in order.
    """

    def __init__(self, recorder: Recorder, framework: str) -> None:
        super().__init__(recorder, framework)
        self.scopes: dict[Hashable, S] = {}

    def stop(self) -> None:
        """End what is open, and begin nothing more; contexts that were entered are left by who reports the end."""
        super().stop()
        for scope in reversed(list(self.scopes.values())):
            scope.closed = True
            if scope.call is not None and scope.call.named:
                with self.guard():
                    scope.call.end()

    def enter(self, key: Hashable, scope: S, context: Context) -> None:
        """Keep a scope that starts, and enter it: its span's context, or this one where it has no span."""
        self.scopes[key] = scope
        scope.enter(context if scope.span is None else scope.span.context)

    def leave(self, key: Hashable) -> S | None:
        """Leave a scope that ends, and return it; what it stands for is still to be ended. None where none is known."""
        scope = self.scopes.pop(key, None)
        if scope is not None:
            scope.leave()
        return scope

    def drop(self, span: OpenSpan | None) -> None:
        """Forget a span that stands for nothing after all: it is never delivered."""
        if span is not None:
            self._open.pop(span.span_id, None)


def begins(method: Callable[..., None]) -> Any:
    """Guard a tracker's method that hears of a start: it is not heard once recording has stopped."""

    @functools.wraps(method)
    def guarded(self: Tracker, *args: Any, **kwargs: Any) -> None:
        if self.live:
            try:
                method(self, *args, **kwargs)
            except Exception as error:  # noqa: BLE001 - logged
                log_failure(self.plugin, error)

    return guarded


def ends(method: Callable[..., None]) -> Any:
    """Guard a tracker's method that hears of an end: always heard, so that contexts that were entered are left."""

    @functools.wraps(method)
    def guarded(self: Tracker, *args: Any, **kwargs: Any) -> None:
        try:
            method(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - logged
            log_failure(self.plugin, error)

    return guarded
