"""Tool calls that models ask for: carried out, or refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

from pydantic_ai.exceptions import ApprovalRequired, CallDeferred
from pydantic_ai.messages import ToolReturn, ToolReturnPart
from pydantic_ai.toolsets import AbstractToolset

from lightning_pydantic_ai import FRAMEWORK
from lightning_spans.record.instrument.patches import replace, replace_in_subclasses
from lightning_spans.record.instrument.tracker import Tracker
from lightning_spans.record.replay import acalled
from lightning_spans.schema import spans as names

try:
    from pydantic_ai.tool_manager import ToolManager
except ImportError:  # 1.x
    from pydantic_ai._tool_manager import ToolManager

if TYPE_CHECKING:
    from lightning_spans.hooks import Recorder

# Where a tool call that a model asked for is carried out, or refused.
TOOL_CALL: Final = "execute_tool_call" if "execute_tool_call" in vars(ToolManager) else "_call_tool"


def bind(recorder: Recorder) -> Iterator[Callable[[], None]]:
    """Follow every tool call, until what is yielded is called."""
    tools = PydanticTools(recorder, FRAMEWORK)
    yield tools.stop
    yield replace(ToolManager, TOOL_CALL, tools.wrap_tool_call)
    yield replace_in_subclasses(AbstractToolset, "call_tool", tools.wrap_own_code)
    if "validate_tool_call" in vars(ToolManager):
        yield replace(ToolManager, "validate_tool_call", tools.wrap_check)


class PydanticTools(Tracker):
    """Begins and ends the spans of tools."""

    def wrap_tool_call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """An agent carries out a tool call of its model's, with its arguments as they were asked for."""

        async def carry_out(manager: Any, given: Any, *args: Any, **kwargs: Any) -> Any:
            call = getattr(given, "call", given)  # since 1.60 with what came of checking its arguments
            span = None
            with self.guard():
                if not _is_answer(manager, call):
                    span = self.begin_tool(call.tool_name, call.tool_call_id, _arguments(call))
            with self.inside(span):
                try:
                    answer = await original(manager, given, *args, **kwargs)
                except Exception as error:
                    self.end(span, error=_reason(error))
                    raise
                with self.guard(span):
                    self.end(span, attributes={names.TOOL_RESULT: _text(call, answer)})
                return answer

        return carry_out

    def wrap_own_code(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A set of tools, an MCP server among them, calls one whose arguments fit."""

        async def call_tool(toolset: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.live:
                return await original(toolset, *args, **kwargs)
            return await acalled(lambda: original(toolset, *args, **kwargs), waits=_waits)

        return call_tool

    def wrap_check(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A tool call's arguments are checked; where they don't fit for the last time, nothing is carried out."""

        async def check(manager: Any, call: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return await original(manager, call, *args, **kwargs)
            except Exception as error:
                with self.guard():
                    span = self.begin_tool(call.tool_name, call.tool_call_id, _arguments(call))
                    self.end(span, error=error)
                raise

        return check


def _arguments(call: Any) -> str:
    """Return a call's arguments as the model gave them: what can't be read is put into an object by Pydantic AI."""
    return call.args if isinstance(call.args, str) else str(call.args_as_json_str())


def _is_answer(manager: Any, call: Any) -> bool:
    """Whether it is no tool but the form in which an agent with an output type answers."""
    definition = manager.get_tool_def(call.tool_name)
    return definition is not None and definition.kind == "output"


def _waits(error: BaseException) -> bool:
    """Whether a tool call waits for somebody."""
    return isinstance(error, CallDeferred | ApprovalRequired)


def _reason(error: Exception) -> BaseException | None:
    """Return what went wrong: Pydantic AI wraps what the model is told; None for a call that waits for somebody."""
    if _waits(error):
        return None
    wrapped = type(error).__name__ in {"ToolRetryError", "ToolFailedError"}
    return (error.__cause__ or error.__context__ or error) if wrapped else error


def _text(call: Any, answer: Any) -> str:
    """Return a tool's result as the model is told it."""
    value = answer.return_value if isinstance(answer, ToolReturn) else answer
    part = ToolReturnPart(tool_name=call.tool_name, content=value, tool_call_id=call.tool_call_id)
    return str(part.model_response_str())
