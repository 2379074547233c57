"""What a program gives its agents: system prompts and tools, as digests by which a change is seen."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

Json = Any
_SYSTEM: Final = frozenset({"system", "developer"})
_PARAMETERS: Final = ("parameters", "input_schema")  # of a tool, in OpenAI's and in Anthropic's shape
_DIGITS: Final = 16


def digest(text: str) -> str:
    """Return 16 hex digits that stand for a text."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:_DIGITS]


def system_prompt(request: Mapping[str, Json]) -> str:
    """Return the system prompt of a request, whatever surface it came by; empty where it has none."""
    return "\n".join(_system_texts(request))


def tool_digests(request: Mapping[str, Json]) -> dict[str, str]:
    """Return a digest of the name, the description and the parameters of each tool that a request offers, by name."""
    tools = request.get("tools")
    found = {}
    for tool in tools if isinstance(tools, list) else ():
        if not isinstance(tool, Mapping):
            continue
        function = tool["function"] if isinstance(tool.get("function"), Mapping) else tool
        parameters = next((function[name] for name in _PARAMETERS if name in function), None)
        name = str(function.get("name") or tool.get("type"))
        facts = [name, function.get("description"), parameters]
        found[name] = digest(json.dumps(facts, sort_keys=True, default=str))
    return found


def _system_texts(request: Mapping[str, Json]) -> Iterator[str]:
    for name in ("instructions", "system"):
        yield from _texts(request.get(name))
    for name in ("messages", "input"):
        messages = request.get(name)
        for message in messages if isinstance(messages, list) else ():
            if isinstance(message, Mapping) and message.get("role") in _SYSTEM:
                yield from _texts(message.get("content"))


def _texts(content: Json) -> Iterator[str]:
    for part in content if isinstance(content, list) else [content]:
        text = part.get("text") if isinstance(part, Mapping) else part
        if isinstance(text, str) and text:
            yield text
