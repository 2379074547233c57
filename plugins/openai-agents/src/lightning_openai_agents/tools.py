"""Adds what the SDK's spans of tool calls lack, and returns recorded results in a replay."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from inspect import isawaitable
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakValueDictionary

import agents
from agents.tool_context import ToolContext
from wrapt import CallableObjectProxy

from lightning_openai.json_text import to_json
from lightning_openai_agents import FRAMEWORK
from lightning_spans.errors import ReplayEndedError
from lightning_spans.record.context import current_attempt
from lightning_spans.record.instrument.patches import replace, replace_in_subclasses
from lightning_spans.record.instrument.scope import Scope, scopes_around
from lightning_spans.record.instrument.tracker import Tracker
from lightning_spans.record.recorder import current_span
from lightning_spans.record.replay import RecordedOutcome, arun_or_replay, keep_raised, tool_around
from lightning_spans.schema import spans as names

if TYPE_CHECKING:
    from lightning_spans.hooks import OpenSpan, Recorder
    from lightning_spans.schema.spans import Json


def bind(recorder: Recorder) -> Iterator[Callable[[], None]]:
    """Patch the SDK to complete the spans of tools; what is yielded removes each patch."""
    tools = SdkTools(recorder, FRAMEWORK)
    yield tools.stop
    yield replace(ToolContext, "from_agent_context", tools.wrap_from_agent_context)
    for kind in (getattr(agents, name, None) for name in _INVOKED):
        if kind is not None:
            yield _invoke_through(tools, kind)
    for kind in _actions():
        yield replace(kind, "execute", tools.wrap_action)
    if find_spec("mcp") is not None:
        from agents.mcp.server import MCPServer

        yield replace_in_subclasses(MCPServer, "call_tool", tools.wrap_call_tool)


_INVOKED: Final = ("FunctionTool", "CustomTool")  # tools with an `on_invoke_tool`: functions, agents, MCP tools
_ACTIONS: Final = ("ComputerAction", "LocalShellAction", "ShellAction", "ApplyPatchAction")


def _actions() -> list[type]:
    """Return what runs the calls of tools that are not functions."""
    home = "agents.run_internal.tool_actions" if find_spec("agents.run_internal") else "agents._run_impl"
    module = import_module(home)
    return [getattr(module, name) for name in _ACTIONS if hasattr(module, name)]


def _invoke_through(tools: SdkTools, kind: Any) -> Callable[[], None]:
    """Wrap the field of each tool that invokes it, also of tools that already exist."""
    kind.on_invoke_tool = _Invoker(tools)
    return lambda: delattr(kind, "on_invoke_tool")


class _Invoker:
    """Replaces the field.

    It returns the same object for a tool each time, because the SDK compares it with the approved one.
    """

    def __init__(self, tools: SdkTools) -> None:
        self._tools = tools
        self._known: WeakValueDictionary[int, _ToolInvoker] = WeakValueDictionary()  # by the id of what they hold

    def __get__(self, tool: Any, kind: type | None = None) -> Any:
        if tool is None:
            raise AttributeError("on_invoke_tool")  # the class itself has no such attribute
        invoke = vars(tool)["on_invoke_tool"]
        if not self._tools.live:
            return invoke
        known = self._known.get(id(invoke))
        if known is None:
            known = self._known[id(invoke)] = _ToolInvoker(invoke, self._tools)
        return known

    def __set__(self, tool: Any, invoke: Any) -> None:
        vars(tool)["on_invoke_tool"] = invoke.__wrapped__ if type(invoke) is _ToolInvoker else invoke


if TYPE_CHECKING:
    _Proxy = CallableObjectProxy[Any]
else:
    _Proxy = CallableObjectProxy  # takes no parameter before wrapt 2


class _ToolInvoker(_Proxy):
    """Invokes a tool; in a replay it returns the recorded outcome."""

    def __init__(self, invoke: Any, tools: SdkTools) -> None:
        super().__init__(invoke)
        self._self_tools = tools

    async def __call__(self, context: Any, arguments: str) -> Any:
        span, guard = tool_around(), self._self_tools.guard
        if span is not None and names.TOOL_ARGUMENTS not in span.attributes:  # a custom tool's
            with guard(span):
                span.set(
                    **{names.TOOL_ARGUMENTS: arguments, names.TOOL_CALL_ID: getattr(context, "tool_call_id", None)}
                )
        scope = _tool_scope()
        try:
            answer = await arun_or_replay(lambda: _invoke_tool(self.__wrapped__, context, arguments), _outcome)
        except asyncio.CancelledError as error:  # the SDK handles its own time limit outside of this call
            if scope is not None:
                scope.error = error
            raise
        if scope is not None and isinstance(scope.error, asyncio.CancelledError):
            scope.error = None  # a time limit within the tool, which the tool handled
        if span is not None and isinstance(answer, str):  # the SDK may be configured to leave it out of its span
            with guard(span):
                span.set(**{names.TOOL_RESULT: answer})
        return answer


async def _invoke_tool(invoke: Any, context: Any, arguments: str) -> Any:
    answer = invoke(context, arguments)
    return await answer if isawaitable(answer) else answer


def _outcome(given: RecordedOutcome) -> Any:
    """Return a tool's result, also if it is the model's message about a failure; the failure is noted."""
    scope = _tool_scope()
    if given.failed and scope is not None:
        scope.error = given.error or given.result
    return given.result if given.failed and given.returned is None and given.result else given.outcome()


def _tool_scope() -> Scope | None:
    for scope in scopes_around():
        if scope.span is not None and scope.span.operation == names.EXECUTE_TOOL:
            return scope
    return None


class SdkTools(Tracker):
    """Completes the spans that the SDK's tracing starts."""

    def wrap_from_agent_context(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Record a tool call's id and arguments. The SDK's span lacks them, or has them only if it may hold data."""

        def from_agent_context(cls: Any, context: Any, tool_call_id: Any, *args: Any, **kwargs: Any) -> Any:
            answer = original(cls, context, tool_call_id, *args, **kwargs)
            tool = current_span()
            if self.live and tool is not None and tool.operation == names.EXECUTE_TOOL:
                with self.guard(tool):
                    tool_call = kwargs.get("tool_call", args[0] if args else None)
                    agent = kwargs.get("agent", args[1] if len(args) > 1 else None)
                    if tool.agent is None and agent is not None:  # approved: it runs before its agent's span (0.20)
                        tool.agent = agent.name
                    if names.TOOL_CALL_ID not in tool.attributes:
                        arguments = getattr(tool_call, "arguments", None)
                        tool.set(**{names.TOOL_CALL_ID: tool_call_id, names.TOOL_ARGUMENTS: arguments})
            return answer

        return from_agent_context

    def wrap_call_tool(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a tool server's call. For a failed call the SDK keeps only the text."""

        async def call_tool(server: Any, *args: Any, **kwargs: Any) -> Any:
            answer = await original(server, *args, **kwargs)
            if self.live and (getattr(answer, "isError", False) or getattr(answer, "is_error", False)):
                with self.guard():
                    scope = _tool_scope()
                    if scope is not None:
                        scope.error = " ".join(str(getattr(part, "text", "")) for part in answer.content)
            return answer

        return call_tool

    def wrap_action(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap an action of a shell, a computer or an editor.

        A replay does not run it, because its result is not recorded.
        """

        async def execute(cls: Any, *args: Any, **kwargs: Any) -> Any:
            attempt = current_attempt() if self.live else None
            if attempt is not None and attempt.replay is not None and attempt.replay.tools != "run":
                raise ReplayEndedError(f'{cls.__name__} of the Agents SDK can\'t be replayed; `tools = "run"` runs it.')
            return await original(cls, *args, **kwargs)

        return execute


def error_text(error: Any) -> str:
    """Return an SDK error as text: its message, and its details if it has some."""
    if not isinstance(error, Mapping):
        return str(error)
    data = error.get("data")
    detail = data.get("error") if isinstance(data, Mapping) else None
    return f"{error.get('message')}: {detail}" if detail else str(error.get("message"))


def fail_tool(scope: Scope, error: BaseException | str) -> None:
    """Note a reported error. A replay repeats it if it took the place of what cut off the tool's own code."""
    if scope.span is not None and isinstance(scope.error, asyncio.CancelledError):
        scope.span.attributes.pop(names.TOOL_RETURNED, None)
        if isinstance(error, BaseException):
            keep_raised(scope.span, error)
    scope.error = error


def note_answer_of_sdk(scope: Scope, output: Any) -> None:
    """Note that the SDK answers for a tool that its time limit cut off."""
    if output is not None and isinstance(scope.error, asyncio.CancelledError):
        fail_tool(scope, str(output))


def waits_for_approval(data: Any) -> bool:
    """Whether a tool has not run, because a person has to approve its call first. The SDK then calls it again."""
    return getattr(getattr(data.output, "run_item", None), "type", None) == "tool_approval_item"


def tool_facts(data: Any, span: OpenSpan | None) -> dict[str, Json]:
    """Return the attributes that a tool's span has when it ends."""
    facts: dict[str, Json] = {}
    output = data.output
    if isinstance(output, agents.FunctionToolResult):  # of a rejected call
        output = output.output
    if output is not None:
        facts[names.TOOL_RESULT] = output if isinstance(output, str) else to_json(output)
    if span is not None and names.TOOL_ARGUMENTS not in span.attributes:
        facts[names.TOOL_ARGUMENTS] = data.input
    return facts
