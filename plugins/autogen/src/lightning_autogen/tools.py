"""Tool spans: an assistant's calls (any workbench, including MCP, and handoffs), and a program's own calls."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from autogen_agentchat.agents import AssistantAgent
from autogen_core import tools as core_tools
from autogen_core.tools import BaseStreamTool, BaseTool, TextResultContent, ToolResult, Workbench

from lightning_autogen import FRAMEWORK
from lightning_autogen.handoffs import tell_handoff
from lightning_openai.json_text import to_json
from lightning_spans.record.context import entered_steps
from lightning_spans.record.instrument.patches import replace, replace_in_subclasses
from lightning_spans.record.instrument.scope import place_of_call
from lightning_spans.record.instrument.tracker import Tracker
from lightning_spans.record.recorder import current_span
from lightning_spans.record.replay import (
    RecordedOutcome,
    aoutcome_for,
    arun_or_replay,
    keep_raised,
    keep_returned,
    tool_around,
)
from lightning_spans.schema import spans as names

if TYPE_CHECKING:
    from lightning_spans.hooks import OpenSpan, Recorder


def bind(recorder: Recorder) -> Iterator[Callable[[], None]]:
    """Patch AutoGen to record every tool call; what is yielded removes each patch."""
    tools = AutogenTools(recorder, FRAMEWORK)
    yield tools.stop
    yield replace(AssistantAgent, "_execute_tool_call", tools.wrap_execute_tool_call)
    yield replace_in_subclasses(Workbench, "call_tool", tools.wrap_call_tool)
    if hasattr(core_tools, "StreamWorkbench"):
        yield replace_in_subclasses(core_tools.StreamWorkbench, "call_tool_stream", tools.wrap_call_tool_stream)
    yield replace_in_subclasses(BaseTool, "run_json", tools.wrap_run_json)
    yield replace_in_subclasses(BaseStreamTool, "run_json_stream", tools.wrap_run_json_stream)


def _tool_result(name: str, given: RecordedOutcome) -> ToolResult:
    """Convert a recorded result to a workbench's type. Most results are one text."""
    if given.returned is not None:
        result: ToolResult = given.outcome()
        return result
    text = given.result or given.error
    return ToolResult(name=name, result=[TextResultContent(content=text)], is_error=given.failed)


def _keep(span: OpenSpan, answer: Any) -> None:
    """Record a workbench's result, unless it is a single text."""
    parts = getattr(answer, "result", None)
    is_text = isinstance(parts, list) and len(parts) == 1 and isinstance(parts[0], TextResultContent)
    keep_returned(span, "" if is_text else answer)


async def _replayed_steps(
    items: AsyncGenerator[Any, None], outcome: Callable[[RecordedOutcome], Any], keep: Callable[[OpenSpan, Any], None]
) -> AsyncGenerator[Any, None]:
    """Return a streaming tool's items; in a replay only the last one, its result."""
    span = tool_around()
    given = None if span is None else await aoutcome_for(span)
    last = None
    try:
        if given is not None:
            yield outcome(given)
            return
        try:
            async for item in items:
                last = item
                yield item
        except Exception as error:
            if span is not None:
                keep_raised(span, error)
            raise
        if span is not None:
            keep(span, last)
    finally:
        await items.aclose()


class AutogenTools(Tracker):
    """Starts and ends tool spans. A call passes through several layers; the outermost creates the span."""

    def wrap_execute_tool_call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap an assistant's tool call, including unknown tools and arguments that are not valid JSON."""

        async def execute_tool_call(tool_call: Any, *args: Any, **kwargs: Any) -> Any:
            span = self._begin(tool_call.name, tool_call.id, tool_call.arguments)
            with self.guard(span):
                tell_handoff(span, tool_call.name, kwargs.get("handoff_tools", args[1] if len(args) > 1 else None))

            def result_of(answer: Any) -> tuple[str, bool]:
                return answer[1].content, bool(answer[1].is_error)

            return await self._call(span, lambda: original(tool_call, *args, **kwargs), result_of)

        return execute_tool_call

    def wrap_call_tool(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a program's call of a workbench's tool."""

        async def call_tool(workbench: Any, name: str, *args: Any, **kwargs: Any) -> Any:
            arguments = kwargs.get("arguments", args[0] if args else None)
            span = self._begin(name, kwargs.get("call_id", args[2] if len(args) > 2 else None), arguments or {})

            def result_of(answer: Any) -> tuple[str, bool]:
                return answer.to_text(), bool(answer.is_error)

            async def call() -> Any:
                carry_out = partial(original, workbench, name, *args, **kwargs)
                return await arun_or_replay(carry_out, partial(_tool_result, name), keep=_keep)

            return await self._call(span, call, result_of)

        return call_tool

    def wrap_call_tool_stream(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap an assistant's call of a streaming workbench tool. The last item is the result."""

        def call_tool_stream(workbench: Any, name: str, *args: Any, **kwargs: Any) -> Any:
            items = original(workbench, name, *args, **kwargs)
            return _replayed_steps(items, partial(_tool_result, name), _keep) if self.live else items

        return call_tool_stream

    def wrap_run_json(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a tool's run."""

        async def run_json(tool: Any, args: Any, *more: Any, **rest: Any) -> Any:
            span = self._begin(tool.name, rest.get("call_id", more[1] if len(more) > 1 else None), args)

            def result_of(answer: Any) -> tuple[str, bool]:
                return tool.return_value_as_string(answer), False

            return await self._call(
                span, lambda: arun_or_replay(lambda: original(tool, args, *more, **rest)), result_of
            )

        return run_json

    def wrap_run_json_stream(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a streaming tool's run. The last item is the result."""

        def run_json_stream(tool: Any, args: Any, *more: Any, **rest: Any) -> Any:
            items = original(tool, args, *more, **rest)
            items = _replayed_steps(items, RecordedOutcome.outcome, keep_returned) if self.live else items
            span = self._begin(tool.name, rest.get("call_id", more[1] if len(more) > 1 else None), args)
            return self._steps(span, items, tool) if self.live else items

        return run_json_stream

    def _begin(self, name: str, call_id: str | None, arguments: Any) -> OpenSpan | None:
        """Begin a tool span; None if an outer layer already has."""
        around = current_span()
        same = around is not None and around.operation == names.EXECUTE_TOOL and around.name == name
        if same and around is not None and call_id in {None, around.attributes.get(names.TOOL_CALL_ID)}:
            return None
        with self.guard():
            text = arguments if isinstance(arguments, str) else to_json(arguments)
            return self.begin_tool(name, call_id, text, place_of_call())
        return None

    async def _call(
        self, span: OpenSpan | None, call: Callable[[], Any], result_of: Callable[[Any], tuple[str, bool]]
    ) -> Any:
        with self.inside(span):
            try:
                answer = await call()
            except BaseException as error:
                self._tell_outer(span, error)
                raise
            with self.guard(span):
                result, failed = result_of(answer)
                self.end(span, error=result if failed else None, attributes={names.TOOL_RESULT: result})
            return answer

    async def _steps(self, span: OpenSpan | None, items: AsyncGenerator[Any, None], tool: Any) -> AsyncIterator[Any]:
        last = None
        steps = items if span is None else entered_steps(span.context, items)
        with self.working(span):
            try:
                async for item in steps:
                    last = item
                    yield item
            except GeneratorExit:
                raise
            except BaseException as error:
                self._tell_outer(span, error)
                raise
            finally:
                await steps.aclose()
            with self.guard(span):
                self.end(span, attributes={names.TOOL_RESULT: tool.return_value_as_string(last)})

    def _tell_outer(self, span: OpenSpan | None, error: BaseException) -> None:
        """Pass an exception to the layer that created the span, because that layer may turn it into a message."""
        around = current_span()
        if span is None and around is not None and around.operation == names.EXECUTE_TOOL:
            with self.guard(around):
                around.set(**{names.ERROR_TYPE: type(error).__qualname__})
