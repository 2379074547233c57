"""Tool spans, also for tool calls that ADK rejects."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterator
from contextvars import ContextVar
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from google.adk.plugins.plugin_manager import PluginManager
from google.adk.tools import BaseTool

from lightning_google_adk import FRAMEWORK
from lightning_spans.record.instrument.imports import when_imported
from lightning_spans.record.instrument.patches import Undo, replace, replace_in_subclasses
from lightning_spans.record.instrument.tracker import Tracker
from lightning_spans.record.replay import arun_or_replay, keep_whole
from lightning_spans.record.returned import write_again
from lightning_spans.schema import spans as names

if TYPE_CHECKING:
    from lightning_spans.hooks import OpenSpan, Recorder

# Tools that carry an agent's final answer. They are matched by name because they exist in different versions.
_ANSWERS: Final = frozenset({"SetModelResponseTool", "FinishTaskTool"})
# These tools change the run itself, so they also run in a replay.
_OF_THE_RUN: Final = frozenset({"transfer_to_agent", "exit_loop"})
# a complete answer is being read
_whole: Final[ContextVar[bool]] = ContextVar("lightning_google_adk_whole", default=False)


def bind(recorder: Recorder) -> Iterator[Callable[[], None]]:
    """Patch ADK to record every tool call; what is yielded removes each patch."""
    tools = AdkTools(recorder, FRAMEWORK)
    yield tools.stop
    yield replace_in_subclasses(BaseTool, "run_async", tools.wrap_run)
    yield replace(PluginManager, "run_on_tool_error_callback", tools.wrap_error)
    yield when_imported("google.adk.workflow._llm_agent_wrapper", tools.follow_tasks)
    unread = UnreadCalls(recorder, FRAMEWORK)
    yield unread.stop
    yield when_imported("google.adk.models.lite_llm", unread.change)


class AdkTools(Tracker):
    """Starts and ends tool spans around ADK's tool calls."""

    def __init__(self, recorder: Recorder, framework: str) -> None:
        super().__init__(recorder, framework)
        self._running: set[int] = set()  # ids of the contexts in use: a subclass may call its parent's method

    def wrap_run(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a tool call."""

        async def carry_out(tool: Any, *, args: Any, tool_context: Any) -> Any:
            known = id(tool_context)
            if not self.live or known in self._running or type(tool).__name__ in _ANSWERS:
                return await original(tool, args=args, tool_context=tool_context)
            span = self.begin_tool(tool.name, getattr(tool_context, "function_call_id", None), _json(args))
            self._running.add(known)
            try:
                with self.inside(span):
                    if span is not None and tool.name == "transfer_to_agent":
                        span.set(**{names.HANDOFF: args.get("agent_name")})
                    answer = await self._own_code(
                        tool, tool_context, lambda: original(tool, args=args, tool_context=tool_context)
                    )
                    self.end(span, error=_refusal(tool, answer), attributes={names.TOOL_RESULT: _text(answer)})
                    return answer
            finally:
                self._running.discard(known)

        return carry_out

    async def _own_code(self, tool: Any, tool_context: Any, run: Callable[[], Awaitable[Any]]) -> Any:
        def keep(span: OpenSpan, answer: Any) -> None:
            if _waits(tool_context):
                span.attributes[names.TOOL_RETURNED] = write_again()
            else:
                keep_whole(span, answer)  # also text, because the model gets an object

        return await (run() if tool.name in _OF_THE_RUN else arun_or_replay(run, keep=keep))

    def wrap_error(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a failed tool call, including a call of an unknown tool, for which ADK passes a bare `BaseTool`."""

        async def told(manager: Any, *, tool: Any, tool_args: Any, tool_context: Any, error: Exception) -> Any:
            if type(tool) is BaseTool:
                self.end(self.begin_tool(tool.name, tool_context.function_call_id, _json(tool_args)), error=error)
            return await original(manager, tool=tool, tool_args=tool_args, tool_context=tool_context, error=error)

        return told

    def follow_tasks(self, wrapper: ModuleType) -> Undo:
        """Record the tasks that models give to sub-agents (`mode="task"`, since ADK 2); return what undoes it."""
        undo = Undo()
        if "_dispatch_task_fc" in vars(wrapper):
            undo.add(replace(wrapper, "_dispatch_task_fc", self.wrap_task))
        return undo

    def wrap_task(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a sub-agent's task. ADK runs it outside the agent that gave the task."""

        async def carry_out(parent: Any, call: Any, ctx: Any) -> Any:
            span = self.begin_tool(str(call.name), call.id, _json(call.args), agent=parent.name)
            with self.inside(span):
                try:
                    output = await original(parent, call, ctx)
                except BaseException as error:
                    if type(error).__name__ == "NodeInterruptedError":  # it waits for a person or an event
                        self.end(span)
                    raise
                self.end(span, attributes={names.TOOL_RESULT: _text(output), names.HANDOFF: call.name})
                return output

        return carry_out


class UnreadCalls(Tracker):
    """Records tool calls with unreadable arguments in LiteLLM's answers.

    ADK drops such calls without calling any hook.
    """

    def change(self, lite_llm: ModuleType) -> Undo:
        """Patch how answers are read; return what undoes it."""
        undo = Undo()
        undo.add(replace(lite_llm, "_message_to_generate_content_response", self.wrap_message))
        if "_parse_tool_call_arguments" in vars(lite_llm):  # since ADK 2
            undo.add(replace(lite_llm, "_parse_tool_call_arguments", self.wrap_streamed))
        return undo

    def wrap_message(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the reading of a complete answer, or of one part of a streamed answer."""

        def read(message: Any, *args: Any, **kwargs: Any) -> Any:
            token = _whole.set(True)
            try:
                answer = original(message, *args, **kwargs)
            except json.JSONDecodeError:  # before ADK 2, where this ends the run
                self._refuse_unread(message, lambda call: _is_json(call.function.arguments))
                raise
            finally:
                _whole.reset(token)
            if not answer.partial:
                known = tuple(str(part.function_call.id) for part in answer.content.parts if part.function_call)
                self._refuse_unread(message, lambda call: str(call.id).startswith(known))  # ADK may shorten an id
            return answer

        return read

    def wrap_streamed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the reading of a call's arguments in a streamed answer."""

        def read(arguments: Any, *, function_name: str | None = None, **kwargs: Any) -> Any:
            try:
                return original(arguments, function_name=function_name, **kwargs)
            except json.JSONDecodeError:
                if not _whole.get():
                    self._refuse(str(function_name), None, arguments)
                raise

        return read

    def _refuse_unread(self, message: Any, is_read: Callable[[Any], bool]) -> None:
        with self.guard():
            for call in message.get("tool_calls") or ():
                if call.type == "function" and not is_read(call):
                    self._refuse(call.function.name, call.id, call.function.arguments)

    def _refuse(self, name: str, call_id: str | None, arguments: str) -> None:
        span = self.begin_tool(name, call_id, arguments)
        self.end(span, error=f"the arguments of {name} are no JSON object, so ADK leaves the call out")


def _waits(tool_context: Any) -> bool:
    """Whether a tool has asked for a confirmation or for credentials; ADK calls it again with the answer."""
    call_id = getattr(tool_context, "function_call_id", None)  # a program may call a tool without a context
    actions = getattr(tool_context, "actions", None)
    asked = (getattr(actions, name, ()) for name in ("requested_tool_confirmations", "requested_auth_configs"))
    return call_id is not None and any(call_id in calls for calls in asked)


def _refusal(tool: Any, answer: Any) -> str | None:
    """Return ADK's message to the model about why a tool's function was not called; None if it was."""
    told = answer.get("error") if isinstance(answer, dict) else None
    return told if isinstance(told, str) and told.startswith(f"Invoking `{tool.name}()` failed as ") else None


def _is_json(text: str) -> bool:
    try:
        json.loads(text or "{}")
    except json.JSONDecodeError:
        return False
    return True


def _text(answer: Any) -> str:
    """Return a tool's result as the text that the model gets."""
    return _json(answer if isinstance(answer, dict) else {"result": answer})


def _json(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, OverflowError):
        return str(value)
