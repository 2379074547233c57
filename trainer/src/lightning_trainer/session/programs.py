"""What a program gives its agents in a request: the system prompt and the tools, as texts and digests."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, Final

from lightning_spans.schema.json import dumps

Json = Any
_SYSTEM: Final = frozenset({"system", "developer"})
_PARAMETERS: Final = ("parameters", "input_schema")  # of a tool, in OpenAI's and in Anthropic's shape
_DIGITS: Final = 16


def digest(text: str) -> str:
    """Return 16 hex digits that identify a text."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:_DIGITS]


def system_prompt(request: Mapping[str, Json]) -> str:
    """Return the system prompt of a request of any API; empty if it has none."""
    return "\n".join(_system_texts(request))


def first_user_text(request: Mapping[str, Json]) -> str:
    """Return the text of the user's first message; empty if there is none."""
    return "\n".join(next((list(_texts(content)) for role, content in _messages(request) if role == "user"), []))


def tools_of(request: Mapping[str, Json]) -> Iterator[tuple[str, str, str]]:
    """Yield name, description and parameters (as JSON) of each tool that a request of any API offers."""
    tools = request.get("tools")
    for tool in tools if isinstance(tools, list) else ():
        if isinstance(tool, Mapping):
            function = tool["function"] if isinstance(tool.get("function"), Mapping) else tool
            parameters = next((function[name] for name in _PARAMETERS if name in function), None)
            name = str(function.get("name") or tool.get("type"))
            yield name, str(function.get("description") or ""), dumps(_sort_keys(parameters or {})).decode()


def _sort_keys(value: Json) -> Json:
    if isinstance(value, Mapping):
        return {str(name): _sort_keys(value[name]) for name in sorted(value, key=str)}
    return [_sort_keys(one) for one in value] if isinstance(value, list) else value


def _system_texts(request: Mapping[str, Json]) -> Iterator[str]:
    for name in ("instructions", "system"):
        yield from _texts(request.get(name))
    for role, content in _messages(request):
        if role in _SYSTEM:
            yield from _texts(content)


def _messages(request: Mapping[str, Json]) -> Iterator[tuple[Json, Json]]:
    for name in ("messages", "input"):
        messages = request.get(name)
        for message in messages if isinstance(messages, list) else ():
            if isinstance(message, Mapping):
                yield message.get("role"), message.get("content")


def _texts(content: Json) -> Iterator[str]:
    for part in content if isinstance(content, list) else [content]:
        text = part.get("text") if isinstance(part, Mapping) else part
        if isinstance(text, str) and text:
            yield text
