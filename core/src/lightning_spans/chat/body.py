"""Bodies of requests and messages: the messages sent, the tools offered and the tools called."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from lightning_spans.schema.json import read_json
from lightning_spans.schema.spans import Json


def messages_of(request: Mapping[str, Json]) -> list[Json] | None:
    """Return the messages of a request on any surface, instructions first; None if it has none that can be read.

    A text, in Responses or a completion, is a user message. A list of one prompt is that prompt.
    """
    given = request.get("messages", request.get("input", request.get("prompt")))
    if isinstance(given, list) and len(given) == 1 and isinstance(given[0], (str, list)):
        given = given[0]
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list):
        return None
    instructions = request.get("instructions", request.get("system"))  # Anthropic's may be blocks
    if isinstance(instructions, str) or (isinstance(instructions, list) and instructions):
        return [{"role": "system", "content": instructions}, *given]
    return given


def tool_schemas(request: Mapping[str, Json]) -> dict[str, Json]:
    """Return the parameter schemas of the tools that a request offers, by name; {} if a tool has none."""
    inner = [tool.get("function", tool) for tool in _objects(request.get("tools"))]
    named = [tool for tool in _objects(inner) if isinstance(tool.get("name"), str)]
    return {tool["name"]: tool.get("parameters", tool.get("input_schema")) or {} for tool in named}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call in a model's message.

    Attributes:
        name: of the tool.
        arguments: JSON text, or its parsed value.
        call_id: the id that the result names; None if there is none.
    """

    name: str
    arguments: Json
    call_id: str | None

    @property
    def parsed(self) -> Json:
        """The arguments as data.

        Raises:
            ValueError: they are not JSON.
        """
        return read_json(self.arguments or "{}") if isinstance(self.arguments, str) else self.arguments

    @property
    def signature(self) -> str:
        """A text that is the same for the same tool and arguments, whatever the order of the argument names."""
        try:
            arguments = self.parsed
        except ValueError:
            arguments = self.arguments
        return json.dumps([self.name, arguments], sort_keys=True, default=str)


def tool_calls(message: Mapping[str, Json]) -> Iterator[ToolCall]:
    """Yield the tool calls of a message: of a chat completion, of Responses' output, or in Anthropic's blocks."""
    for call in _objects(message.get("tool_calls")):
        function = call.get("function")
        if isinstance(function, Mapping):
            yield from _tool_call(function.get("name"), function.get("arguments"), call.get("id"))
    for item in _objects(message.get("output")):
        if item.get("type") == "function_call":
            yield from _tool_call(item.get("name"), item.get("arguments"), item.get("call_id"))
    for block in _objects(message.get("content")):
        if block.get("type") == "tool_use":
            yield from _tool_call(block.get("name"), block.get("input"), block.get("id"))


def _tool_call(name: Json, arguments: Json, call_id: Json) -> Iterator[ToolCall]:
    if isinstance(name, str):
        yield ToolCall(name, arguments, call_id if isinstance(call_id, str) else None)


def tool_call(call_id: Json, name: Json, arguments: Json) -> dict[str, Json]:
    """Return a tool call in the format of chat completions; `arguments` is JSON text, unless a framework parsed it."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _objects(value: Json) -> list[Mapping[str, Json]]:
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []
