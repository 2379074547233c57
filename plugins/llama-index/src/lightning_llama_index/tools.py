"""Tool spans, also for tool calls that LlamaIndex rejects."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from llama_index.core.agent.workflow import AgentWorkflow
from llama_index.core.agent.workflow.base_agent import BaseWorkflowAgent
from llama_index.core.tools import ToolOutput

from lightning_llama_index import FRAMEWORK
from lightning_openai.json_text import to_json
from lightning_spans.record.instrument.patches import replace
from lightning_spans.record.instrument.tracker import Tracker
from lightning_spans.record.replay import RecordedOutcome, arun_or_replay, keep_returned
from lightning_spans.record.returned import error_of
from lightning_spans.schema import spans as names

if TYPE_CHECKING:
    from lightning_spans.hooks import OpenSpan, Recorder

_HANDOFF: Final = "handoff"  # this tool changes the workflow itself, so it also runs in a replay


def bind(recorder: Recorder) -> Iterator[Callable[[], None]]:
    """Patch LlamaIndex to record every tool call; what is yielded removes each patch."""
    tools = LlamaIndexTools(recorder, FRAMEWORK)
    yield tools.stop
    for owner in (BaseWorkflowAgent, AgentWorkflow):
        yield replace(owner, "call_tool", tools.wrap_call_tool)
        yield replace(owner, "_call_tool", tools.wrap_own_code)


class LlamaIndexTools(Tracker):
    """Starts and ends tool spans around LlamaIndex's tool calls."""

    def wrap_call_tool(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap an agent's tool call, including unknown tools. The model gets the text of exceptions."""

        async def call_tool(workflow: Any, ctx: Any, ev: Any) -> Any:
            span = self.begin_tool(ev.tool_name, ev.tool_id, to_json(ev.tool_kwargs))
            with self.inside(span):
                try:
                    result = await original(workflow, ctx, ev)
                except Exception as error:
                    if _waits(error):
                        self.end(span)
                    raise
                with self.guard(span):
                    output = result.tool_output
                    text = str(output.content)
                    failed = (getattr(output, "exception", None) or text) if output.is_error else None
                    if span is not None and ev.tool_name == _HANDOFF and failed is None:
                        failed = await _handed_over(span, ctx, ev, text)
                    self.end(span, error=failed, attributes={names.TOOL_RESULT: text})
                return result

        return call_tool

    def wrap_own_code(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a tool's own code. An exception becomes its output."""

        async def call(workflow: Any, ctx: Any, tool: Any, tool_input: Any) -> Any:
            name = tool.metadata.get_name()
            if not self.live or name == _HANDOFF:
                return await original(workflow, ctx, tool, tool_input)
            own_code = partial(original, workflow, ctx, tool, tool_input)
            return await arun_or_replay(own_code, partial(_output, name, tool_input), keep=_keep, waits=_waits)

        return call


async def _handed_over(span: OpenSpan, ctx: Any, ev: Any, text: str) -> str | None:
    """Record the agent that takes over; return the model's message if that agent is unknown or not allowed."""
    agent = await ctx.store.get("next_agent", default=None)
    if agent is None or agent != ev.tool_kwargs.get("to_agent"):
        return text
    span.set(**{names.HANDOFF: agent})
    return None


def _output(name: str, tool_input: Any, given: RecordedOutcome) -> ToolOutput:
    """Convert a recorded result to a tool's output."""
    raw = given.result if given.returned is None else given.outcome()
    error = error_of(given.error_type, given.error) if given.failed else None
    return ToolOutput(
        content=given.result,
        tool_name=name,
        raw_input=tool_input,
        raw_output=raw,
        is_error=given.failed,
        **({"exception": error} if "exception" in ToolOutput.model_fields else {}),  # since 0.14
    )


def _keep(span: OpenSpan, output: Any) -> None:
    """Record a tool's returned value, if the text for the model differs from it."""
    keep_returned(span, "" if output.is_error else output.raw_output)


def _waits(error: BaseException) -> bool:
    """Whether a tool waits for an event. The step runs again when the event has arrived."""
    return type(error).__name__ == "WaitingForEvent"
