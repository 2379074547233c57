"""Tool calls: of an assistant (any workbench, MCP among them, and handoffs), or of a program that runs tools itself."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

from autogen_agentchat.agents import AssistantAgent
from autogen_core.tools import BaseStreamTool, BaseTool, Workbench

from lightning_autogen.agents import FRAMEWORK, PLUGIN, place
from lightning_openai.elsewhere import to_json
from lightning_spans import spans as names
from lightning_spans.context import entered_steps
from lightning_spans.following import Following
from lightning_spans.patches import Undo, replace, replace_in_subclasses
from lightning_spans.recorder import current_span

if TYPE_CHECKING:
    from lightning_spans.recorder import OpenSpan, Recorder


def bind(recorder: Recorder) -> Callable[[], None]:
    """Follow every tool call, until the callable that is given back is called."""
    calls = ToolCalls(recorder, PLUGIN, FRAMEWORK)
    undo = Undo()
    undo.add(calls.stop)
    undo.add(replace(AssistantAgent, "_execute_tool_call", calls.wrap_execute_tool_call))
    undo.add(replace_in_subclasses(Workbench, "call_tool", calls.wrap_call_tool))
    undo.add(replace_in_subclasses(BaseTool, "run_json", calls.wrap_run_json))
    undo.add(replace_in_subclasses(BaseStreamTool, "run_json_stream", calls.wrap_run_json_stream))
    return undo


class ToolCalls(Following):
    """Begins and ends the spans of tools. One call passes several layers; the outermost makes the span."""

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
            return self._steps(span, items, tool) if self.live else items

        return run_json_stream

    def _begin(self, name: str, call_id: str | None, arguments: Any) -> OpenSpan | None:
        """Begin a tool's span; None where an outer layer has."""
        around = current_span()
        same = around is not None and around.operation == names.EXECUTE_TOOL and around.name == name
        if same and around is not None and call_id in {None, around.attributes.get(names.TOOL_CALL_ID)}:
            return None
        with self.recorder.guard(PLUGIN):
            text = arguments if isinstance(arguments, str) else to_json(arguments)
            return self.begin_tool(name, call_id, text, place())
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
            with self.recorder.guard(PLUGIN, span):
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
            with self.recorder.guard(PLUGIN, span):
                self.end(span, attributes={names.TOOL_RESULT: tool.return_value_as_string(last)})

    def _tell_outer(self, span: OpenSpan | None, error: BaseException) -> None:
        """Tell the layer that made the span what was raised; it may turn the exception into a message."""
        around = current_span()
        if span is None and around is not None and around.operation == names.EXECUTE_TOOL:
            with self.recorder.guard(PLUGIN, around):
                around.set(**{names.ERROR_TYPE: type(error).__qualname__})
