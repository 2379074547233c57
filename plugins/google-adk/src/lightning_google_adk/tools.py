"""Tool calls that models ask for: carried out, or refused."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

from google.adk.plugins.plugin_manager import PluginManager
from google.adk.tools import BaseTool

from lightning_google_adk import FRAMEWORK
from lightning_spans.record.instrument.patches import replace, replace_in_subclasses
from lightning_spans.record.instrument.tracker import Tracker
from lightning_spans.record.replay import acalled, keep_whole
from lightning_spans.schema import spans as names

if TYPE_CHECKING:
    from lightning_spans.hooks import Recorder

# Forms in which an agent answers; by name, since they came one after the other.
_ANSWERS: Final = frozenset({"SetModelResponseTool", "FinishTaskTool"})
# What these do is done to the run, so it is done again in a replay.
_OF_THE_RUN: Final = frozenset({"transfer_to_agent", "exit_loop"})


def bind(recorder: Recorder) -> Iterator[Callable[[], None]]:
    """Follow every tool call, until what is yielded is called."""
    tools = AdkTools(recorder, FRAMEWORK)
    yield tools.stop
    yield replace_in_subclasses(BaseTool, "run_async", tools.wrap_run)
    yield replace(PluginManager, "run_on_tool_error_callback", tools.wrap_error)


class AdkTools(Tracker):
    """Begins and ends the spans of tools."""

    def __init__(self, recorder: Recorder, framework: str) -> None:
        super().__init__(recorder, framework)
        self._running: set[int] = set()  # ids of their contexts: a tool of a subclass may have its parent do the work

    def wrap_run(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A tool is carried out."""

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
                    answer = await self._own_code(tool, lambda: original(tool, args=args, tool_context=tool_context))
                    self.end(span, error=_refusal(tool, answer), attributes={names.TOOL_RESULT: _text(answer)})
                    return answer
            finally:
                self._running.discard(known)

        return carry_out

    async def _own_code(self, tool: Any, run: Callable[[], Awaitable[Any]]) -> Any:
        return await (
            run() if tool.name in _OF_THE_RUN else acalled(run, keep=keep_whole)
        )  # text too: the model is told an object

    def wrap_error(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A tool call has failed: also one of a tool that does not exist, which a bare `BaseTool` stands for."""

        async def told(manager: Any, *, tool: Any, tool_args: Any, tool_context: Any, error: Exception) -> Any:
            if type(tool) is BaseTool:
                self.end(self.begin_tool(tool.name, tool_context.function_call_id, _json(tool_args)), error=error)
            return await original(manager, tool=tool, tool_args=tool_args, tool_context=tool_context, error=error)

        return told


def _refusal(tool: Any, answer: Any) -> str | None:
    """Return why ADK did not call a tool's function, as it tells the model; None if it did."""
    told = answer.get("error") if isinstance(answer, dict) else None
    return told if isinstance(told, str) and told.startswith(f"Invoking `{tool.name}()` failed as ") else None


def _text(answer: Any) -> str:
    """Return a tool's result as the model is told it."""
    return _json(answer if isinstance(answer, dict) else {"result": answer})


def _json(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, OverflowError):
        return str(value)
