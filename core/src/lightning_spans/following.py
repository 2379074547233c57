"""What a plugin keeps while it follows a framework: its open spans, each ended once, with what went wrong inside."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, TypeVar

from lightning_spans import spans as names
from lightning_spans.context import current_agent, entered, entered_steps

if TYPE_CHECKING:
    from opentelemetry.context import Context

    from lightning_spans.recorder import OpenSpan, Recorder
    from lightning_spans.spans import Json

T = TypeVar("T")


class Following:
    """The open spans of one framework. A span that could not be begun is None, which every method takes.

    Attributes:
        recorder: takes the spans.
        plugin: the package that follows, for what is logged.
        framework: the plugin's name, on every span.
        live: whether anything is recorded still; wrappers outlive the detaching where somebody patched after us.
    """

    def __init__(self, recorder: Recorder, plugin: str, framework: str) -> None:
        self.recorder = recorder
        self.plugin = plugin
        self.framework = framework
        self.live = True
        self._open: dict[str, OpenSpan] = {}  # by span id

    def stop(self) -> None:
        """End what is open, and begin nothing more."""
        self.live = False
        for span in reversed(list(self._open.values())):
            self.end(span)

    def begin_agent(self, name: str, context: Context | None = None) -> OpenSpan | None:
        """Begin the span of an agent that gets to work."""
        return self.begin(names.INVOKE_AGENT, name, agent=name, context=context)

    def begin_tool(
        self, name: str, call_id: str | None, arguments: str, context: Context | None = None
    ) -> OpenSpan | None:
        """Begin the span of a tool call; `arguments` is JSON text. Its agent is the one at work."""
        facts = {names.TOOL_NAME: name, names.TOOL_CALL_ID: call_id, names.TOOL_ARGUMENTS: arguments}
        return self.begin(names.EXECUTE_TOOL, name, context=context, attributes=facts)

    def begin(
        self,
        operation: str,
        name: str,
        *,
        agent: str | None = None,
        context: Context | None = None,
        attributes: Mapping[str, Json] | None = None,
    ) -> OpenSpan | None:
        """Begin a span; None when nothing is recorded any more, or it could not be begun, which is logged.

        Args:
            operation: ``invoke_agent``, ``execute_tool``, ``invoke_workflow``.
            name: what a viewer shows.
            agent: who is at work in it; the agent of the context where None.
            context: where it begins; the current context by default.
            attributes: None values are left out.
        """
        if not self.live:
            return None
        with self.recorder.guard(self.plugin):
            known = {names.FRAMEWORK: self.framework, **(attributes or {})}
            who = current_agent(context) if agent is None else agent
            span = self.recorder.start(operation, name, agent=who, context=context, attributes=known)
            self._open[span.span_id] = span
            return span
        return None

    def end(
        self,
        span: OpenSpan | None,
        *,
        error: BaseException | str | None = None,
        attributes: Mapping[str, Json] | None = None,
    ) -> None:
        """End a span; the second end of one changes nothing."""
        if span is not None:
            self._open.pop(span.span_id, None)
            if span.end_ns is None:
                with self.recorder.guard(self.plugin, span):
                    span.end(error=error, attributes=attributes)

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
        """Give the items of a generator that works under the span; what their reader does in between is not."""
        with self.working(span):
            inner = items if span is None else entered_steps(span.context, items)
            try:
                async for item in inner:
                    yield item
            finally:
                await inner.aclose()
