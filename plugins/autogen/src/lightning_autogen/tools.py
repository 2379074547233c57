"""Tool calls: of an assistant (any workbench, MCP among them, and handoffs), or of a program that runs tools itself."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

from autogen_agentchat.agents import AssistantAgent
from autogen_core.tools import BaseStreamTool, BaseTool, Workbench

from lightning_autogen.agents import FRAMEWORK, PLUGIN, place
from lightning_openai.elsewhere import to_json
from lightning_spans import spans as names
from lightning_spans.context import current_agent, entered, entered_steps
from lightning_spans.patches import Undo, replace, replace_in_subclasses
from lightning_spans.recorder import current_span

if TYPE_CHECKING:
    from lightning_spans.recorder import OpenSpan, Recorder


def bind(recorder: Recorder) -> Callable[[], None]:
    """Follow every tool call, until the callable that is given back is called."""
    calls = ToolCalls(recorder)
    undo = Undo()
    undo.add(calls.stop)
    undo.add(replace(AssistantAgent, "_execute_tool_call", calls.wrap_execute_tool_call))
    undo.add(replace_in_subclasses(Workbench, "call_tool", calls.wrap_call_tool))
    undo.add(replace_in_subclasses(BaseTool, "run_json", calls.wrap_run_json))
    undo.add(replace_in_subclasses(BaseStreamTool, "run_json_stream", calls.wrap_run_json_stream))
    return undo


class ToolCalls:
    """Begins and ends the spans of tools. One call passes several layers; the outermost makes the span."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._live = True
        self._open: dict[str, OpenSpan] = {}  # by span id

    def stop(self) -> None:
        """End what is open, and hear no more."""
        self._live = False
        for span in reversed(list(self._open.values())):
            span.end()

    def wrap_execute_tool_call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """An assistant calls a tool. It also knows of tools that are not there and of arguments that are no JSON."""

        async def execute_tool_call(tool_call: Any, *args: Any, **kwargs: Any) -> Any:
            span = self._begin(tool_call.name, tool_call.id, tool_call.arguments)

            def result_of(answer: Any) -> tuple[str, bool]:
                return answer[1].content, bool(answer[1].is_error)

            return await self._call(span, lambda: original(tool_call, *args, **kwargs), result_of)

        return execute_tool_call

    def wrap_call_tool(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A program calls a tool of a workbench."""

        async def call_tool(workbench: Any, name: str, *args: Any, **kwargs: Any) -> Any:
            arguments = kwargs.get("arguments", args[0] if args else None)
            span = self._begin(name, kwargs.get("call_id", args[2] if len(args) > 2 else None), arguments or {})

            def result_of(answer: Any) -> tuple[str, bool]:
                return answer.to_text(), bool(answer.is_error)

            return await self._call(span, lambda: original(workbench, name, *args, **kwargs), result_of)

        return call_tool

    def wrap_run_json(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A tool runs."""

        async def run_json(tool: Any, args: Any, *more: Any, **rest: Any) -> Any:
            span = self._begin(tool.name, rest.get("call_id", more[1] if len(more) > 1 else None), args)

            def result_of(answer: Any) -> tuple[str, bool]:
                return tool.return_value_as_string(answer), False

            return await self._call(span, lambda: original(tool, args, *more, **rest), result_of)

        return run_json

    def wrap_run_json_stream(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A streaming tool runs; its last item is the result."""

        def run_json_stream(tool: Any, args: Any, *more: Any, **rest: Any) -> Any:
            items = original(tool, args, *more, **rest)
            span = self._begin(tool.name, rest.get("call_id", more[1] if len(more) > 1 else None), args)
            return self._steps(span, items, tool) if self._live else items

        return run_json_stream

    def _begin(self, name: str, call_id: str | None, arguments: Any) -> OpenSpan | None:
        """Begin a tool's span; None where an outer layer has."""
        around = current_span()
        same = around is not None and around.operation == names.EXECUTE_TOOL and around.name == name
        if not self._live or (
            same and around is not None and call_id in {None, around.attributes.get(names.TOOL_CALL_ID)}
        ):
            return None
        with self._recorder.guard(PLUGIN):
            context = place()
            attributes = {
                names.FRAMEWORK: FRAMEWORK,
                names.TOOL_NAME: name,
                names.TOOL_CALL_ID: call_id,
                names.TOOL_ARGUMENTS: arguments if isinstance(arguments, str) else to_json(arguments),
            }
            span = self._recorder.start(
                names.EXECUTE_TOOL, name, agent=current_agent(context), context=context, attributes=attributes
            )
            self._open[span.span_id] = span
            return span
        return None

    async def _call(
        self, span: OpenSpan | None, call: Callable[[], Any], result_of: Callable[[Any], tuple[str, bool]]
    ) -> Any:
        try:
            if span is None:
                return await call()
            with entered(span.context):
                answer = await call()
        except BaseException as error:
            self._failed(span, error)
            raise
        with self._recorder.guard(PLUGIN, span):
            result, failed = result_of(answer)
            self._end(span, result, result if failed else None)
        self._end(span, None, None)
        return answer

    async def _steps(self, span: OpenSpan | None, items: AsyncGenerator[Any, None], tool: Any) -> AsyncIterator[Any]:
        steps = items if span is None else entered_steps(span.context, items)
        last = None
        try:
            async for item in steps:
                last = item
                yield item
        except GeneratorExit:
            raise
        except BaseException as error:
            self._failed(span, error)
            raise
        finally:
            await steps.aclose()
            if span is not None and span.end_ns is None:
                with self._recorder.guard(PLUGIN, span):
                    self._end(span, tool.return_value_as_string(last), None)
                self._end(span, None, None)

    def _failed(self, span: OpenSpan | None, error: BaseException) -> None:
        """End a span, or tell the outer layer, which may turn the exception into a message."""
        if span is not None:
            self._open.pop(span.span_id, None)
            span.end(error=error)
            return
        around = current_span()
        if around is not None and around.operation == names.EXECUTE_TOOL:
            around.set(**{names.ERROR_TYPE: type(error).__qualname__})

    def _end(self, span: OpenSpan | None, result: str | None, error: str | None) -> None:
        if span is not None and span.end_ns is None:
            self._open.pop(span.span_id, None)
            span.end(error=error, attributes={names.TOOL_RESULT: result})
