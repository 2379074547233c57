"""The text of a message on any surface, for its readers: judges, reflecting models, people."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from lightning_spans.chat.body import tool_call, tool_calls
from lightning_spans.schema.spans import Json


def chat_messages(message: Json) -> Iterator[Json]:
    """Return a message as in chat completions: several, if it is an answer of Responses, which has items.

    Calls of tools and their results have the same form then; reasoning is left out. Other messages stay as they are.
    """
    items = message.get("output") if isinstance(message, Mapping) and "type" not in message else None
    for item in items if isinstance(items, list) else [message]:
        kind = item.get("type") if isinstance(item, Mapping) else None
        if kind == "function_call":
            given = item.get("arguments")
            arguments = given if isinstance(given, str) else json.dumps(given)
            call = tool_call(item.get("call_id"), item.get("name"), arguments)
            yield {"role": "assistant", "content": None, "tool_calls": [call]}
        elif kind == "function_call_output":
            yield {"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")}
        elif kind != "reasoning":
            yield item


def text_of(content: Json) -> str:
    """Return the content of a message as text: the texts of its parts, one per line, and other parts as JSON."""
    if content is None:
        return ""
    read = texts_of(content)
    whole = len(read) == (len(content) if isinstance(content, list) else 1)
    return "\n".join(read) if whole else json.dumps(content, default=str)


def texts_of(content: Json) -> list[str]:
    """Return the texts in the content of a message: all of it, or its parts that are text."""
    parts = content if isinstance(content, list) else [content]
    said = (part.get("text") if isinstance(part, Mapping) else part for part in parts)
    return [text for text in said if isinstance(text, str)]


def answer_text(message: Mapping[str, Json]) -> str:
    """Return an answer for people: its text, and the tools that it asks for."""
    parts = [part for part in chat_messages(message) if isinstance(part, Mapping)]
    texts = filter(None, (text for part in parts for text in texts_of(part.get("content"))))
    return "\n".join([*texts, *(f"{call.name}({_arguments(call.arguments)})" for p in parts for call in tool_calls(p))])


def _arguments(arguments: Json) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments)
