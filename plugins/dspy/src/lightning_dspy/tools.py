"""Tool spans: calls by DSPy's agents, as text or native tool calls, and a program's own calls.

Before 3.4 DSPy drops the ids of native tool calls; they are found again by name and arguments.
"""

from __future__ import annotations

import json
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import dspy
from dspy.adapters.base import Adapter
from dspy.adapters.types.tool import Tool, ToolCalls

from lightning_dspy import FRAMEWORK
from lightning_dspy.agents import calling_module, is_dspys
from lightning_dspy.told import agent_with_tools
from lightning_openai.json_text import to_json
from lightning_spans.record.context import current_agent
from lightning_spans.record.instrument.patches import replace
from lightning_spans.record.instrument.tool_requests import ToolRequest, take
from lightning_spans.record.instrument.tracker import Tracker
from lightning_spans.record.recorder import current_span
from lightning_spans.record.replay import arun_or_replay, run_or_replay
from lightning_spans.schema import spans as names

if TYPE_CHECKING:
    from lightning_spans.hooks import OpenSpan, Recorder

_ANSWERS: Final = frozenset({"finish", "submit"})  # tools of DSPy's agents that end the work: the form of their answer
_TRACES: Final = 1024  # number of traces whose requests are kept; the oldest are dropped


def bind(recorder: Recorder) -> Iterator[Callable[[], None]]:
    """Patch DSPy to record every tool call; what is yielded removes each patch."""
    tools = DspyTools(recorder, FRAMEWORK)
    yield tools.stop
    yield replace(Tool, "__call__", tools.wrap_call)
    yield replace(Tool, "acall", tools.wrap_acall)
    yield replace(ToolCalls.ToolCall, "execute", tools.wrap_execute)
    yield replace(Adapter, "_call_postprocess", tools.wrap_postprocess)
    yield replace(dspy.Predict, "forward", tools.wrap_forward)
    yield replace(dspy.Predict, "aforward", tools.wrap_aforward)


class DspyTools(Tracker):
    """Starts and ends tool spans around DSPy's tool calls."""

    def __init__(self, recorder: Recorder, framework: str) -> None:
        super().__init__(recorder, framework)
        self._asked: OrderedDict[str, list[ToolRequest]] = OrderedDict()  # by trace: what models asked for

    def wrap_call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a synchronous tool call."""

        def call(tool: Any, **kwargs: Any) -> Any:
            if not self._counts(tool.name):
                return original(tool, **kwargs)
            span = self._begin(tool.name, kwargs)
            with self.inside(span):
                result = run_or_replay(lambda: original(tool, **kwargs))
                self.end(span, attributes={names.TOOL_RESULT: _text(result)})
                return result

        return call

    def wrap_acall(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap an asynchronous tool call."""

        async def acall(tool: Any, **kwargs: Any) -> Any:
            if not self._counts(tool.name):
                return await original(tool, **kwargs)
            span = self._begin(tool.name, kwargs)
            with self.inside(span):
                result = await arun_or_replay(lambda: original(tool, **kwargs))
                self.end(span, attributes={names.TOOL_RESULT: _text(result)})
                return result

        return acall

    def wrap_execute(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a program's execution of a given tool call.

        Without functions, it uses one of the program's variables.
        """

        def execute(call: Any, functions: Any = None) -> Any:
            if functions is None:
                frame = sys._getframe(1)
                found = frame.f_locals.get(call.name) or frame.f_globals.get(call.name)
                functions = {} if found is None else {call.name: found}
            span = self._begin(call.name, call.args or {}, getattr(call, "id", None))
            with self.inside(span):
                try:
                    result = original(call, _replayable_functions(call.name, functions))
                except Exception as error:
                    self.end(span, error=error.__cause__ or error)
                    raise
                self.end(span, attributes={names.TOOL_RESULT: _text(result)})
                return result

        return execute

    def wrap_postprocess(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap an adapter's reading of a model's answers, which may contain tool calls."""

        def postprocess(adapter: Any, *args: Any, **kwargs: Any) -> Any:
            with self.guard():
                outputs = kwargs.get("outputs", args[2] if len(args) > 2 else ())
                self._note([call for output in outputs if isinstance(output, dict) for call in _calls_in(output)])
            return original(adapter, *args, **kwargs)

        return postprocess

    def wrap_forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a predictor's answer. As part of an agent it may ask for an unknown tool."""

        def forward(predictor: Any, **kwargs: Any) -> Any:
            answer = original(predictor, **kwargs)
            self._refuse(answer)
            return answer

        return forward

    def wrap_aforward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a predictor's answer, asynchronously."""

        async def aforward(predictor: Any, **kwargs: Any) -> Any:
            answer = await original(predictor, **kwargs)
            self._refuse(answer)
            return answer

        return aforward

    def _counts(self, name: str) -> bool:
        """Whether a call is a tool's: not the end of an agent's work, nor a call for which `execute` began a span."""
        if not self.live:
            return False
        span = current_span()
        if span is not None and span.operation == names.EXECUTE_TOOL and span.name == name and _is_inner(span):
            return False
        return not (name in _ANSWERS and is_dspys(calling_module()))

    def _begin(self, name: str, arguments: Mapping[str, Any], call_id: str | None = None) -> OpenSpan | None:
        if not self.live:
            return None
        with self.guard():
            span = current_span()
            asked = self._asked.get(span.trace_id, []) if span is not None else []
            agent = current_agent()
            made = take(
                asked,
                lambda known: known.name == name and known.arguments == arguments and call_id in {None, known.call_id},
                lambda known: known.agent == agent,
            )
            call_id = call_id or (None if made is None else made.call_id)
            return self.begin_tool(name, call_id, to_json(arguments), agent=None if made is None else made.agent)
        return None

    def _note(self, calls: list[ToolRequest]) -> None:
        span = current_span()
        if not calls or span is None or not self.live:
            return
        self._asked.setdefault(span.trace_id, []).extend(calls)
        while len(self._asked) > _TRACES:
            self._asked.popitem(last=False)

    def _refuse(self, answer: Any) -> None:
        """Record a call of a tool that DSPy's agent does not have."""
        with self.guard():
            agent = agent_with_tools()
            if not self.live or agent is None:
                return
            name = getattr(answer, "next_tool_name", None)
            asked = [] if name is None else [(name, getattr(answer, "next_tool_args", None) or {})]
            asked += [(call.name, call.args) for call in getattr(getattr(answer, "tool_calls", None), "tool_calls", ())]
            for name, arguments in asked:
                if name not in agent.tools:
                    self.end(self._begin(name, arguments), error=f"there is no tool {name!r}")


def _replayable_functions(name: str, functions: Any) -> dict[str, Callable[..., Any]]:
    """Return a tool call's function; in a replay it runs only if there is no recorded result."""
    if isinstance(functions, Mapping):
        function = functions.get(name)
    else:
        function = next((tool.func for tool in functions if tool.name == name), None)
    return {} if function is None else {name: lambda **arguments: run_or_replay(lambda: function(**arguments))}


def _is_inner(span: OpenSpan) -> bool:
    return span.attributes.get(names.FRAMEWORK) == FRAMEWORK


def _calls_in(output: Mapping[str, Any]) -> Iterator[ToolRequest]:
    for call in output.get("tool_calls") or ():
        function = _get(call, "function") or call
        arguments = _get(function, "arguments") or _get(function, "args") or "{}"
        read = json.loads(arguments) if isinstance(arguments, str) else arguments
        yield ToolRequest(_get(call, "id"), _get(function, "name"), read, current_agent())


def _get(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)


def _text(result: Any) -> str:
    return result if isinstance(result, str) else to_json(result)
