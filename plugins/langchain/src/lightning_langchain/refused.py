"""Tool calls that no tool carries out: of a tool that is not there, or with arguments that can't be read.

LangChain tells of none of these. The first kind shows in the message by which a node of tools answers, the second in
the answer itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from langchain_core.messages import ToolMessage

from lightning_spans.record.instrument.tool_requests import ToolRequest

if TYPE_CHECKING:
    from langchain_core.outputs import LLMResult


def offered_in(params: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of the tools that a model is offered, in whichever provider's format."""
    tools = params.get("tools") or params.get("functions") or ()
    known = [tool.get("function") or tool for tool in tools if isinstance(tool, Mapping)]
    return frozenset(str(tool["name"]) for tool in known if isinstance(tool, Mapping) and tool.get("name"))


def unreadable_in(response: LLMResult, agent: str | None) -> Iterator[tuple[ToolRequest, str]]:
    """Return the tool calls of an answer whose arguments can't be read, and why."""
    for generation in (generation for row in response.generations for generation in row):
        for call in getattr(getattr(generation, "message", None), "invalid_tool_calls", None) or ():
            name, arguments = call.get("name") or "unknown", call.get("args") or ""
            why = call.get("error") or f"the arguments of {name} can't be read"
            yield ToolRequest(call.get("id"), name, arguments, agent), str(why)


def answers_in(outputs: Any) -> Iterator[ToolMessage]:
    """Return the messages by which tool calls are answered, in what a node gave."""
    if isinstance(outputs, ToolMessage):
        yield outputs
    elif isinstance(outputs, Mapping):
        for value in outputs.values():
            yield from (part for part in value if isinstance(part, ToolMessage)) if isinstance(value, list) else ()
    elif isinstance(outputs, list):
        for part in outputs:
            yield from answers_in(part)
    elif isinstance(update := getattr(outputs, "update", None), Mapping | list):
        yield from answers_in(update)
