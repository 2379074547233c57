"""Agents and tools at work: their spans, and their names for the wire."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

from pydantic_ai import Agent, CallToolsNode, ModelRequestNode
from pydantic_ai.exceptions import ApprovalRequired, CallDeferred
from pydantic_ai.messages import ToolReturn, ToolReturnPart
from pydantic_ai.run import AgentRun

from lightning_spans import spans as names
from lightning_spans.context import Steps, attach, current, entered, entered_steps, overlaid
from lightning_spans.following import Following
from lightning_spans.patches import Undo, replace
from lightning_spans.recorder import current_span

try:
    from pydantic_ai.tool_manager import ToolManager
except ImportError:  # 1.x
    from pydantic_ai._tool_manager import ToolManager

if TYPE_CHECKING:
    from opentelemetry.context import Context

    from lightning_spans.recorder import OpenSpan, Recorder

PLUGIN: Final = "lightning_pydantic_ai"
FRAMEWORK: Final = "pydantic-ai"
UNNAMED: Final = "agent"  # what Pydantic AI calls an agent whose name it could not find either
# Where a tool call that a model asked for is carried out, or refused.
TOOL_CALL: Final = "execute_tool_call" if "execute_tool_call" in vars(ToolManager) else "_call_tool"


def bind(recorder: Recorder) -> Callable[[], None]:
    """Follow every agent and tool, until the callable that is given back is called."""
    at_work = AtWork(recorder, PLUGIN, FRAMEWORK)
    undo = Undo()
    undo.add(at_work.stop)
    undo.add(replace(Agent, "iter", at_work.wrap_iter))
    for step in ("next", "__anext__"):
        undo.add(replace(AgentRun, step, at_work.wrap_step))
    for node in (ModelRequestNode, CallToolsNode):
        undo.add(replace(node, "stream", at_work.wrap_stream))
    undo.add(replace(ToolManager, TOOL_CALL, at_work.wrap_tool_call))
    if "validate_tool_call" in vars(ToolManager):
        undo.add(replace(ToolManager, "validate_tool_call", at_work.wrap_check))
    return undo


class AtWork(Following):
    """Begins and ends our spans with the agents' runs and their tools' calls.

    A run is entered for as long as the caller's block lasts, so that what he does there is done in the agent's name. He
    may have entered another since, or be in another task; so each step of a run enters it anew.
    """

    def __init__(self, recorder: Recorder, plugin: str, framework: str) -> None:
        super().__init__(recorder, plugin, framework)
        self._runs: dict[int, OpenSpan] = {}  # by the id of the run's state, which lives as long

    def wrap_iter(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """An agent runs: every way to run one, streamed or not, goes through `iter`."""

        def iterate(agent: Any, *args: Any, **kwargs: Any) -> Any:
            run = original(agent, *args, **kwargs)
            return self._running(agent, run) if self.live else run

        return iterate

    @asynccontextmanager
    async def _running(self, agent: Any, run: AbstractAsyncContextManager[Any]) -> AsyncIterator[Any]:
        span = self.begin_agent(agent.name or UNNAMED)
        outer = current()
        with self.working(span):
            if span is not None:
                attach(span.context)
            try:
                async with run as begun:
                    state = _state(begun)
                    if span is not None:
                        self._runs[state] = span
                    try:
                        yield begun
                    finally:
                        self._runs.pop(state, None)
            finally:
                attach(overlaid(outer))  # no token: a run that is given up may end in another context

    def wrap_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A run goes on to its next node."""

        async def step(run: Any, *args: Any, **kwargs: Any) -> Any:
            span = self._runs.get(_state(run))
            if span is None or current_span() is span:
                return await original(run, *args, **kwargs)
            with entered(overlaid(span.context)):
                return await original(run, *args, **kwargs)

        return step

    def wrap_stream(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A node begins to stream what it does."""

        def stream(node: Any, ctx: Any, *args: Any, **kwargs: Any) -> Any:
            span = self._runs.get(id(getattr(ctx, "state", None)))
            streaming = original(node, ctx, *args, **kwargs)
            return streaming if span is None else _streamed_in(span.context, streaming)

        return stream

    def wrap_tool_call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """An agent carries out a tool call of its model's, with its arguments as they were asked for."""

        async def carry_out(manager: Any, given: Any, *args: Any, **kwargs: Any) -> Any:
            call = getattr(given, "call", given)  # since 1.60 with what came of checking its arguments
            span = None
            with self.recorder.guard(PLUGIN):
                if not _is_answer(manager, call):
                    span = self.begin_tool(call.tool_name, call.tool_call_id, call.args_as_json_str())
            with self.inside(span):
                try:
                    answer = await original(manager, given, *args, **kwargs)
                except Exception as error:
                    self.end(span, error=_reason(error))
                    raise
                with self.recorder.guard(PLUGIN, span):
                    self.end(span, attributes={names.TOOL_RESULT: _text(call, answer)})
                return answer

        return carry_out

    def wrap_check(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A tool call's arguments are checked; where they don't fit for the last time, nothing is carried out."""

        async def check(manager: Any, call: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return await original(manager, call, *args, **kwargs)
            except Exception as error:
                with self.recorder.guard(PLUGIN):
                    span = self.begin_tool(call.tool_name, call.tool_call_id, call.args_as_json_str())
                    self.end(span, error=error)
                raise

        return check


def _state(run: Any) -> int:
    return id(getattr(getattr(run, "ctx", None), "state", None))


@asynccontextmanager
async def _streamed_in(context: Context, streaming: AbstractAsyncContextManager[Any]) -> AsyncIterator[Any]:
    """Begin, go on and end a stream in `context`, but for what its reader does meanwhile."""
    steps = Steps(context)
    steps.enter()
    try:
        async with streaming as items:
            steps.leave()
            try:  # events are a generator, which carries a tool out when the next is asked for
                yield entered_steps(context, items) if isinstance(items, AsyncGenerator) else items
            finally:
                steps.enter()
    finally:
        steps.leave()


def _is_answer(manager: Any, call: Any) -> bool:
    """Whether it is no tool but the form in which an agent with an output type answers."""
    definition = manager.get_tool_def(call.tool_name)
    return definition is not None and definition.kind == "output"


def _reason(error: Exception) -> BaseException | None:
    """Give what went wrong: Pydantic AI wraps what the model is told; None for a call that waits for somebody."""
    if isinstance(error, CallDeferred | ApprovalRequired):
        return None
    wrapped = type(error).__name__ in {"ToolRetryError", "ToolFailedError"}
    return (error.__cause__ or error.__context__ or error) if wrapped else error


def _text(call: Any, answer: Any) -> str:
    """Give a tool's result as the model is told it."""
    value = answer.return_value if isinstance(answer, ToolReturn) else answer
    part = ToolReturnPart(tool_name=call.tool_name, content=value, tool_call_id=call.tool_call_id)
    return str(part.model_response_str())
