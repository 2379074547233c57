"""Tool calls: which agent each belongs to, and its outcome.

A tool call belongs to the agent whose model asked for it, also when several agents share one tool node.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from langchain_core.messages import ToolMessage
from langchain_core.tools import BaseTool

from lightning_openai.json_text import to_json
from lightning_spans.record.instrument.patches import replace, replace_in_subclasses
from lightning_spans.record.instrument.scope import current_scope
from lightning_spans.record.instrument.tool_requests import ToolRequest, take
from lightning_spans.record.replay import arun_or_replay, run_or_replay

if TYPE_CHECKING:
    from langchain_core.outputs import LLMResult

    from lightning_langchain.agents import ChainRun, ChainRuns

Conversation: TypeAlias = tuple[str | None, str]  # the attempt that contains it, and LangGraph's thread
_CONVERSATIONS: Final = 1024  # number of conversations that may wait for approval at once; the oldest are dropped
_CALLS: Final = 64  # and per conversation
_INVALID: Final = "invalid_tool"  # what LangChain's `AgentExecutor` runs when the model calls an unknown tool
_INVALID_CLASS: Final = "InvalidTool"
_called: Final[ContextVar[str | None]] = ContextVar("lightning_langchain_tool_call", default=None)


def bind(tracker: ChainRuns) -> Iterator[Callable[[], None]]:
    """In a replay, return recorded results instead of running tools; what is yielded removes each patch.

    Also keep the model's id of the call for which a tool runs, which callbacks get only since langchain-core 1.0, and
    report that a tool was cancelled, which langchain-core 0.3 does not do. Note failures that the tool's own
    `handle_tool_error` or `handle_validation_error` handles: without an id of the call, LangChain reports no failure.
    """

    @contextmanager
    def calling(tool_call_id: str | None) -> Iterator[None]:
        token = _called.set(tool_call_id)
        around = current_scope()
        try:
            yield
        except BaseException as error:
            if (inner := current_scope()) is not around:
                tracker.fail_tool(inner, error)
            raise
        finally:
            _called.reset(token)

    def wrap_call(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(tool: Any, *args: Any, tool_call_id: str | None = None, **kwargs: Any) -> Any:
            with calling(tool_call_id):
                return original(tool, *args, tool_call_id=tool_call_id, **kwargs)

        return call

    def wrap_acall(original: Callable[..., Any]) -> Callable[..., Any]:
        async def acall(tool: Any, *args: Any, tool_call_id: str | None = None, **kwargs: Any) -> Any:
            with calling(tool_call_id):
                return await original(tool, *args, tool_call_id=tool_call_id, **kwargs)

        return acall

    def wrap_run(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(tool: Any, *args: Any, **kwargs: Any) -> Any:
            if not tracker.live or type(tool).__name__ == _INVALID_CLASS:
                return original(tool, *args, **kwargs)
            with _note_failures():
                return run_or_replay(lambda: original(tool, *args, **kwargs), waits=is_control_flow)

        return run

    def wrap_arun(original: Callable[..., Any]) -> Callable[..., Any]:
        async def arun(tool: Any, *args: Any, **kwargs: Any) -> Any:
            if not tracker.live or type(tool).__name__ == _INVALID_CLASS:
                return await original(tool, *args, **kwargs)
            with _note_failures():
                return await arun_or_replay(lambda: original(tool, *args, **kwargs), waits=is_control_flow)

        return arun

    yield replace(BaseTool, "run", wrap_call)
    yield replace(BaseTool, "arun", wrap_acall)
    yield replace(BaseTool, "_parse_input", _wrap_parse)
    yield replace_in_subclasses(BaseTool, "_run", wrap_run)
    yield replace_in_subclasses(BaseTool, "_arun", wrap_arun)


def _wrap_parse(original: Callable[..., Any]) -> Callable[..., Any]:
    def parse(tool: Any, *args: Any, **kwargs: Any) -> Any:
        with _note_failures():
            return original(tool, *args, **kwargs)

    return parse


@contextmanager
def _note_failures() -> Iterator[None]:
    """Note on the surrounding tool's run whether its own code fails."""
    scope = current_scope()
    run = scope if scope is not None and getattr(scope, "kind", None) == "tool" else None
    try:
        yield
    except Exception as error:
        if run is not None:
            run.error = error
        raise
    if run is not None:
        run.error = None  # an inner failure that its own code handled


def called_for() -> str | None:
    """Return the model's id of the call for which the surrounding tool runs; None if there is none."""
    return _called.get()


def is_control_flow(error: BaseException) -> bool:
    """Whether an exception is LangGraph's way to pause or to jump, not a failure."""
    return any(kind.__name__ == "GraphBubbleUp" for kind in type(error).__mro__)


class WaitingRequests:
    """Tool calls that were requested in conversations which were interrupted before the tool ran."""

    def __init__(self) -> None:
        self._left: OrderedDict[Conversation, list[ToolRequest]] = OrderedDict()

    def begin(self, requests: list[ToolRequest], conversation: Conversation | None) -> None:
        """Add what an earlier run of the conversation left."""
        if self._left and conversation is not None:
            requests.extend(self._left.pop(conversation, ()))

    def end(self, requests: list[ToolRequest], conversation: Conversation | None) -> None:
        """Keep what remains of a run that has ended."""
        if requests and conversation is not None:
            self._left[conversation] = requests[-_CALLS:]  # some are never run: those that carry the final answer
            if len(self._left) > _CONVERSATIONS:
                self._left.popitem(last=False)


def requests_in(response: LLMResult, agent: str | None) -> Iterator[ToolRequest]:
    """Return the tool calls in the answer of an agent's model."""
    messages = [getattr(generation, "message", None) for row in response.generations for generation in row]
    for call in [call for message in messages for call in getattr(message, "tool_calls", None) or ()]:
        if call_id := call.get("id"):
            yield ToolRequest(call_id, call["name"], call["args"], agent)


def take_request(
    requests: list[ToolRequest], name: str, call_id: str | None, arguments: Mapping[str, Any] | None, agent: str | None
) -> ToolRequest | None:
    """Take out the request for a tool call; None if no model of its tree asked for it.

    Requests are found by id, or by name and arguments if the program calls a tool with only these. If several agents
    made the same request, the surrounding agent's is taken, because ids are unique only within a conversation.
    """

    def fits(known: ToolRequest) -> bool:
        return known.call_id == call_id if call_id is not None else (known[1:3] == (name, arguments))

    return take(requests, fits, lambda known: known.agent == agent)


def find_unknown_request(run: ChainRun, arguments: Mapping[str, Any] | None, agent: str | None) -> ToolRequest | None:
    """Return the request for an unknown tool that LangChain answers by a tool of its own; None for another tool.

    Calls at the same time answer one request each, in the order of the requests.
    """
    asked = (arguments or {}).get("requested_tool_name") if run.name == _INVALID else None
    if asked is None:
        return None
    taken = [other.refused for other in run.inner.values()]
    found = (request for request in run.unknown.values() if request.name == asked and request not in taken)
    return next(found, None) or ToolRequest(None, asked, {}, agent)


def tool_result(output: Any) -> tuple[str, ToolMessage | None]:
    """Return a tool's result as text, and the message that carries it, if there is one."""
    message = _message_of(output)
    content = message.content if message is not None else output
    return content if isinstance(content, str) else to_json(content), message


def _message_of(output: Any) -> ToolMessage | None:
    """Find the message in a tool's output: the output itself, or within a LangGraph `Command` or a list."""
    if isinstance(output, ToolMessage):
        return output
    update = getattr(output, "update", None)
    messages = update.get("messages") if isinstance(update, dict) else output if isinstance(output, list) else None
    found = [message for message in messages or () if isinstance(message, ToolMessage)]
    return found[-1] if found else None
