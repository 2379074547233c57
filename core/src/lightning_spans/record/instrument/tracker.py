"""The state of a plugin while it follows a framework: its open spans and scopes, and the errors within them.

`Tracker` is for work that a call of the framework encloses, `EventTracker` for work that is reported by its start and
its end.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator, Callable, Generator, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from lightning_spans.record.context import current_agent, entered_iteration, entered_steps, use_context
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
    """The open spans of one framework. A span that could not be begun is None, which every method accepts.

    Args:
        recorder: receives the spans.
        framework: the plugin's name, on every span.

    Attributes:
        plugin: the plugin's package, for log messages.
        live: whether anything is still recorded; wrappers exist after detaching if another library patched later.
    """

    def __init__(self, recorder: Recorder, framework: str) -> None:
        self.recorder = recorder
        self.framework = framework
        self.plugin = f"lightning_{framework.replace('-', '_')}"
        self.live = True
        self._open: dict[str, OpenSpan] = {}  # by span id

    def stop(self) -> None:
        """End all open spans, and begin no more."""
        self.live = False
        for span in reversed(list(self._open.values())):
            self.end(span)

    def guard(self, span: OpenSpan | None = None) -> AbstractContextManager[None]:
        """Log an error within the block instead of raising it into the agent."""
        return self.recorder.guard(self.plugin, span)

    def begin_agent(self, name: str, context: Context | None = None, *, by_default: bool = False) -> OpenSpan | None:
        """Begin the span of an agent that starts to work.

        Args:
            name: of the agent.
            context: where it begins; the current context by default.
            by_default: whether the name is the framework's default for unnamed agents. If `agent()` or another
                framework names the current agent, that name stays, and there is no span.
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
        """Begin the span of a tool call. `arguments` is JSON text. By default its agent is the context's."""
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
        """Begin a span; None if nothing is recorded any more, or if beginning failed, which is logged.

        Args:
            operation: ``invoke_agent``, ``execute_tool``, ``invoke_workflow``.
            name: shown by viewers.
            agent: the agent at work in it; None: the agent of the context.
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
        """End a span, now or at a Unix time in nanoseconds. Ending it again changes nothing."""
        if span is not None:
            self._open.pop(span.span_id, None)
            if span.end_ns is None:
                try:
                    span.end(error=error, attributes=attributes, end_ns=end_ns)
                except Exception as raised:  # noqa: BLE001 - logged
                    log_failure(self.plugin, raised, span)

    @contextmanager
    def working(self, span: OpenSpan | None) -> Iterator[None]:
        """End the span with the block.

        As failed if the block raised, and as abandoned if it is an abandoned generator.
        """
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
        """Enter the span and end it with the block, so that what the block calls is under it.

        For generators, use `steps`.
        """
        with self.working(span), nullcontext() if span is None else use_context(span.context):
            yield

    @contextmanager
    def start_inside(self, span: OpenSpan) -> Iterator[None]:
        """Enter the span for a block that starts the work. If the block raises, the span ends with that error."""
        try:
            with use_context(span.context):
                yield
        except BaseException as error:
            self.end(span, error=error)
            raise

    async def steps(self, span: OpenSpan | None, items: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
        """Return the items of an asynchronous generator that works under the span; its reader's code does not.

        For a synchronous generator, use `iterate`.
        """
        with self.working(span):
            inner = items if span is None else entered_steps(span.context, items)
            try:
                async for item in inner:
                    yield item
            finally:
                await inner.aclose()

    def iterate(self, span: OpenSpan | None, items: Generator[T, None, None]) -> Generator[T, None, None]:
        """Return the items of a synchronous generator; see `steps`."""
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
    """Tracks work that is reported by its start and its end, each in a separate call.

    Attributes:
        scopes: what has started and not ended, by the plugin's own key, in order.
    """

    def __init__(self, recorder: Recorder, framework: str) -> None:
        super().__init__(recorder, framework)
        self.scopes: dict[Hashable, S] = {}

    def stop(self) -> None:
        """End all open work, and begin no more. Entered contexts are left by the code that reports the end."""
        super().stop()
        for scope in reversed(list(self.scopes.values())):
            scope.closed = True
            if scope.call is not None and scope.call.named:
                with self.guard():
                    scope.call.end()

    def enter(self, key: Hashable, scope: S, context: Context) -> None:
        """Add a scope that starts, and enter it: the context of its span, or the current one if it has no span."""
        self.scopes[key] = scope
        scope.enter(context if scope.span is None else scope.span.context)

    def leave(self, key: Hashable) -> S | None:
        """Leave a scope that ends, and return it; the caller ends its span. None if the scope is unknown."""
        scope = self.scopes.pop(key, None)
        if scope is not None:
            scope.leave()
        return scope

    def drop(self, span: OpenSpan | None) -> None:
        """Drop a span that turned out to represent nothing. It is never delivered."""
        if span is not None:
            self._open.pop(span.span_id, None)


def begins(method: Callable[..., None]) -> Any:
    """Guard a tracker's method for start events, which are ignored once recording has stopped."""

    @functools.wraps(method)
    def guarded(self: Tracker, *args: Any, **kwargs: Any) -> None:
        if self.live:
            try:
                method(self, *args, **kwargs)
            except Exception as error:  # noqa: BLE001 - logged
                log_failure(self.plugin, error)

    return guarded


def ends(method: Callable[..., None]) -> Any:
    """Guard a tracker's method for end events, which are always processed, so that entered contexts are left."""

    @functools.wraps(method)
    def guarded(self: Tracker, *args: Any, **kwargs: Any) -> None:
        try:
            method(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - logged
            log_failure(self.plugin, error)

    return guarded
