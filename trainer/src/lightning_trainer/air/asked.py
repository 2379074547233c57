"""What a model call asked of tools, in any of the dialects that the gateway speaks, and which call asked for a tool."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from lightning_spans.records import loads
from lightning_spans.spans import REQUEST, TOOL_CALL_ID, Json
from lightning_spans.trace import Node, Trace


@dataclass(frozen=True, slots=True)
class Asked:
    """One tool that a model call asked for.

    Attributes:
        node: the model call.
        name: of the tool.
        arguments: JSON text, or what it was parsed to.
        call_id: the id that the result names; None where there is none.
    """

    node: Node
    name: str
    arguments: Json
    call_id: str | None

    @property
    def parsed(self) -> Json:
        """The arguments as data.

        Raises:
            ValueError: they are no JSON.
        """
        return loads(self.arguments or "{}") if isinstance(self.arguments, str) else self.arguments

    @property
    def signature(self) -> str:
        """The same text for the same tool with the same arguments, whatever the order of their names."""
        try:
            arguments = self.parsed
        except ValueError:
            arguments = self.arguments
        return json.dumps([self.name, arguments], sort_keys=True, default=str)


def asked_by(node: Node) -> list[Asked]:
    """Give the tools that a model call asked for, in all of its choices."""
    return [asked for choice in node.answer.choices for asked in _asked(node, choice.message)]


def schemas_of(node: Node) -> dict[str, Json]:
    """Give the parameter schemas of the tools that a model call was offered, by name; {} where a tool has none."""
    offered = request_of(node).get("tools")
    found: dict[str, Json] = {}
    for tool in offered if isinstance(offered, list) else []:
        inner = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if isinstance(inner, Mapping) and isinstance(inner.get("name"), str):
            found[inner["name"]] = inner.get("parameters", inner.get("input_schema")) or {}
    return found


def request_of(node: Node) -> Mapping[str, Json]:
    """Give the body of the request: as the gateway had it, else as the wire kept it."""
    if node.call is not None and node.call.request:
        return node.call.request
    text = node.span.attributes.get(REQUEST)
    try:
        body = loads(text) if isinstance(text, str) else None
    except ValueError:
        return {}
    return body if isinstance(body, Mapping) else {}


def callers(trace: Trace) -> dict[Node, Node]:
    """Say for each tool that ran which model call asked for it; one that nothing asked for is left out.

    By the id of the tool call where both have it, else the last call of the same agent, or of any where the tool has no
    agent, that had ended when the tool began.
    """
    by_id = {asked.call_id: node for node in trace.chats for asked in asked_by(node) if asked.call_id is not None}
    found: dict[Node, Node] = {}
    for tool in trace.tools:
        call_id = tool.span.attributes.get(TOOL_CALL_ID)
        node = by_id.get(call_id) if isinstance(call_id, str) else None
        node = node or _before(trace, tool)
        if node is not None:
            found[tool] = node
    return found


def _before(trace: Trace, tool: Node) -> Node | None:
    agent = tool.span.agent
    ended = [n for n in trace.chats if n.span.end_ns <= tool.span.start_ns and agent in (None, n.span.agent)]
    return max(ended, key=lambda node: node.span.end_ns, default=None)


def _asked(node: Node, message: Mapping[str, Json]) -> Iterator[Asked]:
    for call in _mappings(message.get("tool_calls")):  # chat completions
        function = call.get("function")
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            yield Asked(node, function["name"], function.get("arguments"), _text(call.get("id")))
    for item in _mappings(message.get("output")):  # responses
        if item.get("type") == "function_call" and isinstance(item.get("name"), str):
            yield Asked(node, item["name"], item.get("arguments"), _text(item.get("call_id")))
    for block in _mappings(message.get("content")):  # messages
        if block.get("type") == "tool_use" and isinstance(block.get("name"), str):
            yield Asked(node, block["name"], block.get("input"), _text(block.get("id")))


def _mappings(value: Json) -> list[Mapping[str, Json]]:
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []


def _text(value: Json) -> str | None:
    return value if isinstance(value, str) else None
