"""Tool spans: calls that a model asks for, calls in the code that it writes, and the execution of that code.

A managed agent is called as a tool. `final_answer` tools only carry an agent's answer and are not recorded as tool
calls.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from smolagents.agent_types import AgentAudio, AgentImage, AgentText, handle_agent_output_types
from smolagents.agents import MultiStepAgent, ToolCallingAgent
from smolagents.default_tools import FinalAnswerTool
from smolagents.local_python_executor import PythonExecutor
from smolagents.tools import Tool
from smolagents.utils import truncate_content

from lightning_openai.json_text import to_json
from lightning_smolagents import FRAMEWORK
from lightning_spans.record.instrument.patches import replace, replace_in_subclasses
from lightning_spans.record.instrument.tool_requests import ToolRequest, take
from lightning_spans.record.instrument.tracker import Tracker
from lightning_spans.record.replay import RecordedOutcome, keep_returned, run_or_replay, tool_around
from lightning_spans.schema import spans as names

if TYPE_CHECKING:
    from lightning_spans.hooks import OpenSpan, Recorder

CODE: Final = "python_interpreter"  # smolagents' name for running code


def bind(recorder: Recorder) -> Iterator[Callable[[], None]]:
    """Patch smolagents to record every tool call; what is yielded removes each patch."""
    tools = SmolTools(recorder, FRAMEWORK)
    yield tools.stop
    yield replace(ToolCallingAgent, "process_tool_calls", tools.wrap_process)
    yield replace(ToolCallingAgent, "execute_tool_call", tools.wrap_execute)
    yield replace_in_subclasses(Tool, "__call__", tools.wrap_call)
    yield replace(MultiStepAgent, "__call__", tools.wrap_managed)
    yield replace_in_subclasses(PythonExecutor, "__call__", tools.wrap_code)


class SmolTools(Tracker):
    """Starts and ends tool spans around smolagents' tool calls."""

    def __init__(self, recorder: Recorder, framework: str) -> None:
        super().__init__(recorder, framework)
        self._asked: dict[int, list[ToolRequest]] = {}  # by the id of the agent whose model asked
        self._waiting: dict[str, str] = {}  # by the span of a call: the tool that has still to run within it

    def wrap_process(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the processing of a model's answer. Only here do the calls have ids."""

        def process(agent: Any, chat_message: Any, *args: Any, **kwargs: Any) -> Generator[Any, None, None]:
            with self.guard():
                self._asked[id(agent)] = [
                    ToolRequest(call.id, call.function.name, call.function.arguments)
                    for call in chat_message.tool_calls or ()
                ]
            try:
                yield from original(agent, chat_message, *args, **kwargs)
            finally:
                self._asked.pop(id(agent), None)

        return process

    def wrap_execute(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a tool call that a model requested, including unknown tools."""

        def execute(agent: Any, tool_name: str, arguments: Any) -> Any:
            if not self.live or isinstance(agent.tools.get(tool_name), FinalAnswerTool):
                return original(agent, tool_name, arguments)
            span = None
            with self.guard():
                request = self._request(agent, tool_name, arguments)
                span = self.begin_tool(tool_name, request.call_id if request else None, _text_of(arguments))
            if span is None:
                return original(agent, tool_name, arguments)
            self._waiting[span.span_id] = tool_name
            with self.inside(span):
                try:
                    result = original(agent, tool_name, arguments)
                except Exception as error:
                    self.end(span, error=error.__cause__ or error)
                    raise
                finally:
                    self._waiting.pop(span.span_id, None)
                self.end(span, attributes={names.TOOL_RESULT: observation_text(result)})
                return result

        return execute

    def _request(self, agent: Any, name: str, arguments: Any) -> ToolRequest | None:
        """Take out the model's request. Equal parallel calls are told apart by the identity of their arguments."""
        return take(
            self._asked.get(id(agent), []),
            lambda request: request.name == name and (request.arguments or {}) == (arguments or {}),
            lambda request: request.arguments is arguments,
        )

    def wrap_call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a tool's own code: for a model's call, or for code, where it is a call of its own."""

        def call(tool: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.live or isinstance(tool, FinalAnswerTool):
                return original(tool, *args, **kwargs)
            given = {key: value for key, value in kwargs.items() if key != "sanitize_inputs_outputs"}
            sanitized = kwargs.get("sanitize_inputs_outputs", False)

            def outcome(record: RecordedOutcome) -> Any:
                value = record.outcome()
                return handle_agent_output_types(value, tool.output_type) if sanitized else value

            arguments = _name_arguments(list(tool.inputs), args, given)
            return self._run(tool.name, arguments, lambda: original(tool, *args, **kwargs), outcome)

        return call

    def wrap_managed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a call of a managed agent, by a model or by code."""

        def call(agent: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.live or not agent.name:
                return original(agent, *args, **kwargs)
            arguments = _name_arguments(["task"], args, kwargs)
            return self._run(agent.name, arguments, lambda: original(agent, *args, **kwargs), RecordedOutcome.outcome)

        return call

    def _run(
        self, name: str, arguments: dict[str, Any], work: Callable[[], Any], outcome: Callable[[RecordedOutcome], Any]
    ) -> Any:
        around = tool_around()
        if around is not None and self._waiting.get(around.span_id) == name:
            del self._waiting[around.span_id]
            return run_or_replay(work, outcome, keep=_keep)
        span = None
        with self.guard():
            span = self.begin_tool(name, None, to_json(arguments))
        if span is None:
            return work()
        with self.inside(span):
            result = run_or_replay(work, outcome, keep=_keep)
            self.end(span, attributes={names.TOOL_RESULT: observation_text(result)})
            return result

    def wrap_code(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the execution of code that a model wrote. A replay runs it too, because later code needs its variables.

        Only its tools are replayed.
        """

        def run(executor: Any, code_action: str) -> Any:
            span = self.begin_tool(CODE, None, to_json({"code": code_action})) if self.live else None
            with self.inside(span):
                output = original(executor, code_action)
                with self.guard(span):
                    last = truncate_content(str(output.output))
                    told = f"Execution logs:\n{output.logs}Last output from code snippet:\n{last}"
                    self.end(span, attributes={names.TOOL_RESULT: told})
                return output

        return run


def observation_text(result: Any) -> str:
    """Return a result as the text that a model gets. Images and audio are kept separately."""
    if type(result) in {AgentImage, AgentAudio}:
        return f"Stored {'image.png' if type(result) is AgentImage else 'audio.mp3'!r} in memory."
    return str(result).strip()


def _keep(span: OpenSpan, value: object) -> None:
    keep_returned(span, value.to_raw() if isinstance(value, AgentText) else value)


def _text_of(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else to_json(arguments or {})


def _name_arguments(known: Sequence[str], args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    if len(args) == 1 and not kwargs and isinstance(args[0], dict):
        return dict(args[0])
    return {**dict(zip(known, args, strict=False)), **kwargs}
