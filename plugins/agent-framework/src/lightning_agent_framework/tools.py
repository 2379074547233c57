"""Tool spans: the arguments the model requested and the result it got."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from agent_framework import FunctionTool, _tools

from lightning_agent_framework import FRAMEWORK
from lightning_openai.json_text import to_json
from lightning_spans.record.instrument.patches import replace
from lightning_spans.record.instrument.tracker import Tracker
from lightning_spans.record.replay import arun_or_replay
from lightning_spans.schema import spans as names

if TYPE_CHECKING:
    from lightning_spans.hooks import OpenSpan, Recorder


def bind(recorder: Recorder) -> Iterator[Callable[[], None]]:
    """Patch the framework to record every tool call; what is yielded removes each patch."""
    tools = AgentFrameworkTools(recorder, FRAMEWORK)
    yield tools.stop
    yield replace(_tools, "_execute_single_function_call", tools.wrap_execute)
    yield replace(FunctionTool, "_invoke_function", tools.wrap_invoke)


class AgentFrameworkTools(Tracker):
    """Starts and ends tool spans around the framework's tool calls."""

    def wrap_execute(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a tool call that a model requested."""

        async def execute(function_call: Any, **kwargs: Any) -> Any:
            if self._is_left_to_host(function_call, kwargs):
                return await original(function_call, **kwargs)
            span = self._begin(function_call)
            with self.inside(span):
                contents, stop = await original(function_call, **kwargs)
                with self.guard(span):
                    self._end(span, contents)
                return contents, stop

        return execute

    def _is_left_to_host(self, function_call: Any, given: Mapping[str, Any]) -> bool:
        """Whether the framework only returns the call, for the program or the model's server to carry out."""
        with self.guard():
            name = _tools._underlying_function_call(function_call).name
            known = given["tool_map"].get(name)
            if known is None:
                return name in {one.name for one in given["config"].get("additional_tools") or ()} or (
                    function_call.type == "function_approval_response"
                )
            return bool(known.declaration_only) and hasattr(_tools, "_as_user_input_pause")  # older: an error
        return False

    def _begin(self, function_call: Any) -> OpenSpan | None:
        with self.guard():
            call = _tools._underlying_function_call(function_call)  # id of the call that a person had to approve
            arguments = call.arguments if isinstance(call.arguments, str) else to_json(call.arguments or {})
            return self.begin_tool(call.name, call.call_id, arguments)
        return None

    def _end(self, span: OpenSpan | None, contents: Any) -> None:
        last = contents[-1] if contents else None
        told = getattr(last, "result", None)
        text = told if isinstance(told, str) else "" if told is None else to_json(told)
        self.end(span, error=getattr(last, "exception", None), attributes={names.TOOL_RESULT: text})

    def wrap_invoke(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the tool's own code."""

        async def invoke(tool: Any, call_kwargs: Any) -> Any:
            return await arun_or_replay(lambda: original(tool, call_kwargs))

        return invoke
