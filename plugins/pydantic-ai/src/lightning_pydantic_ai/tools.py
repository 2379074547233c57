"""Tool spans, also for tool calls that Pydantic AI rejects."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

from pydantic_ai.exceptions import ApprovalRequired, CallDeferred
from pydantic_ai.messages import ToolReturn, ToolReturnPart
from pydantic_ai.toolsets import AbstractToolset

from lightning_pydantic_ai import FRAMEWORK
from lightning_spans.record.instrument.patches import replace, replace_in_subclasses
from lightning_spans.record.instrument.tracker import Tracker
from lightning_spans.record.replay import arun_or_replay
from lightning_spans.schema import spans as names

try:
    from pydantic_ai.tool_manager import ToolManager
except ImportError:  # 1.x
    from pydantic_ai._tool_manager import ToolManager

if TYPE_CHECKING:
    from lightning_spans.hooks import Recorder

# The methods that run or reject a tool call of a model.
TOOL_CALL: Final = "execute_tool_call" if "execute_tool_call" in vars(ToolManager) else "_call_tool"


def bind(recorder: Recorder) -> Iterator[Callable[[], None]]:
    """Patch Pydantic AI to record every tool call; what is yielded removes each patch."""
    tools = PydanticTools(recorder, FRAMEWORK)
    yield tools.stop
    yield replace(ToolManager, TOOL_CALL, tools.wrap_tool_call)
    yield replace_in_subclasses(AbstractToolset, "call_tool", tools.wrap_own_code)
    if "validate_tool_call" in vars(ToolManager):
        yield replace(ToolManager, "validate_tool_call", tools.wrap_check)


class PydanticTools(Tracker):
    """Starts and ends tool spans around Pydantic AI's tool calls."""

    def wrap_tool_call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap an agent's tool call, with the arguments as the model wrote them."""

        async def carry_out(manager: Any, given: Any, *args: Any, **kwargs: Any) -> Any:
            call = getattr(given, "call", given)  # since 1.60 with the result of validating its arguments
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
        """Wrap the call of a toolset's tool (including MCP servers) with valid arguments."""

        async def call_tool(toolset: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.live:
                return await original(toolset, *args, **kwargs)
            return await arun_or_replay(lambda: original(toolset, *args, **kwargs), waits=_waits)

        return call_tool

    def wrap_check(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the validation of a tool call's arguments. If they are invalid for the last time, no tool runs."""

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
    """Return a call's arguments as the model wrote them. Pydantic AI wraps unreadable ones in an object."""
    return call.args if isinstance(call.args, str) else str(call.args_as_json_str())


def _is_answer(manager: Any, call: Any) -> bool:
    """Whether a tool only carries the final answer of an agent with an output type."""
    definition = manager.get_tool_def(call.tool_name)
    return definition is not None and definition.kind == "output"


def _waits(error: BaseException) -> bool:
    """Whether a tool call waits for a person or an event."""
    return isinstance(error, CallDeferred | ApprovalRequired)


def _reason(error: Exception) -> BaseException | None:
    """Return the error, which Pydantic AI wraps in the model's message; None for a call that waits."""
    if _waits(error):
        return None
    wrapped = type(error).__name__ in {"ToolRetryError", "ToolFailedError"}
    return (error.__cause__ or error.__context__ or error) if wrapped else error


def _text(call: Any, answer: Any) -> str:
    """Return a tool's result as the text that the model gets."""
    value = answer.return_value if isinstance(answer, ToolReturn) else answer
    part = ToolReturnPart(tool_name=call.tool_name, content=value, tool_call_id=call.tool_call_id)
    return str(part.model_response_str())
