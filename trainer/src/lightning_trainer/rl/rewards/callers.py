"""Which model call called a tool, and the request of a model call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from lightning_spans.adapter.trace import Node, Trace
from lightning_spans.chat.body import ToolCall, tool_calls
from lightning_spans.schema.agents import parts_of
from lightning_spans.schema.json import loads
from lightning_spans.schema.spans import REQUEST, TOOL_CALL_ID, Json


class ToolCaller(NamedTuple):
    """A model call, and the index of its answer that called; None if it is unknown."""

    node: Node
    choice: int | None = None


def called_tools(node: Node) -> list[tuple[int, ToolCall]]:
    """Return the tools that a model call called, each with the index of the answer that called it."""
    return [(choice.index, call) for choice in node.answer.choices for call in tool_calls(choice.message)]


def request_of(node: Node) -> Mapping[str, Json]:
    """Return the body of the request: the gateway's, otherwise the span's."""
    if node.call is not None and node.call.request:
        return node.call.request
    text = node.span.attributes.get(REQUEST)
    try:
        body = loads(text) if isinstance(text, str) else None
    except ValueError:
        return {}
    return body if isinstance(body, Mapping) else {}


def callers(trace: Trace) -> dict[Node, ToolCaller]:
    """Return for each tool that ran the model call that called it; tools that no model called are left out.

    It is found by the id of the tool call if both have it, otherwise it is the last call that had ended when the tool
    began: of the same agent (by its path, if that distinguishes agents of one name), or of any if the tool has no
    agent.
    """
    by_id = {
        call.call_id: ToolCaller(node, choice)
        for node in trace.chats
        for choice, call in called_tools(node)
        if call.call_id is not None
    }
    found: dict[Node, ToolCaller] = {}
    for tool in trace.tools:
        call_id = tool.span.attributes.get(TOOL_CALL_ID)
        caller = by_id.get(call_id) if isinstance(call_id, str) else None
        if caller is None and (before := _before(trace, tool)) is not None:
            caller = ToolCaller(before)
        if caller is not None:
            found[tool] = caller
    return found


def _before(trace: Trace, tool: Node) -> Node | None:
    ended = [n for n in trace.chats if n.span.end_ns <= tool.span.start_ns]
    path = tool.path
    if path is not None:  # of agents with one name, the one at the tool's path, as far as both paths are known
        same = [n for n in ended if n.path == path]
        ended = same or [n for n in ended if n.path is not None and _may_be(n.path, path)]
    return max(ended, key=lambda node: node.span.end_ns, default=None)


def _may_be(one: str, other: str) -> bool:
    """Whether two paths may be one agent's, of which one is more detailed: ``extract`` and ``billing/extract``."""
    return all(left == right for left, right in zip(reversed(parts_of(one)), reversed(parts_of(other)), strict=False))
