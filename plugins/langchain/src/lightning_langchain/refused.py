"""Tool calls that never run: of unknown tools, or with unreadable arguments.

LangChain reports neither. The first kind appears in the message with which a tool node answers, the second in the
model's answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from langchain_core.messages import ToolMessage

from lightning_spans.record.instrument.tool_requests import ToolRequest

if TYPE_CHECKING:
    from langchain_core.outputs import LLMResult


def offered_in(params: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of the tools offered to a model, in any provider's format."""
    tools = params.get("tools") or params.get("functions") or ()
    known = [tool.get("function") or tool for tool in tools if isinstance(tool, Mapping)]
    return frozenset(str(tool["name"]) for tool in known if isinstance(tool, Mapping) and tool.get("name"))


def unreadable_in(response: LLMResult, agent: str | None) -> Iterator[tuple[ToolRequest, str]]:
    """Return an answer's tool calls with unreadable arguments, and the reason for each."""
    for generation in (generation for row in response.generations for generation in row):
        for call in getattr(getattr(generation, "message", None), "invalid_tool_calls", None) or ():
            name, arguments = call.get("name") or "unknown", call.get("args") or ""
            why = call.get("error") or f"the arguments of {name} can't be read"
            yield ToolRequest(call.get("id"), name, arguments, agent), str(why)


def answers_in(outputs: Any) -> Iterator[ToolMessage]:
    """Return the messages in a node's output that answer tool calls."""
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
