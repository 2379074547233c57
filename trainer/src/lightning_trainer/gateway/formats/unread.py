"""Detects answers that look like a call but are none, because a model with an unknown format would fail silently."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from lightning_trainer.gateway.formats.calls import Tools, json_at, parameters_of
from lightning_trainer.gateway.formats.table import formats
from lightning_trainer.reasons.continuation import OTHER

_MOST_OBJECTS: Final = 20  # length of an answer that is searched
_NAMES: Final = ("name", "tool", "tool_name", "function", "function_name", "action")
_ARGUMENTS: Final = ("arguments", "parameters", "args", "params", "input", "action_input", "tool_input")


def unread(content: str | None, tools: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the format of whose calls an answer without calls looks like; None if it looks like none.

    Args:
        content: of an answer to a request with tools in which no call was found.
        tools: of the request.

    Returns:
        A format's name, or ``other`` if a tool is named next to arguments in some other way.
    """
    text = (content or "").strip()
    if not text:
        return None
    for each in formats():
        if not each.first_only and any(mark in text for mark in each.marks):
            return each.name
    schemas = parameters_of(tools)
    return _of_the_start(text, schemas) or (OTHER if _names_a_tool(text, schemas) else None)


def _of_the_start(text: str, schemas: Tools) -> str | None:
    """Return the format of an answer that is a call without its marks, or in a format without marks."""
    for each in formats():
        if each.first_only or each.name == "mistral":
            begun = text if each.first_only else f"[TOOL_CALLS]{text}"  # control tokens are left out of content
            try:
                calls, _ = each.read(begun, schemas)
            except (ValueError, KeyError, TypeError, IndexError, RecursionError):
                continue
            if any(call.name in schemas for call in calls):
                return each.name
    return None


def _names_a_tool(text: str, schemas: Tools) -> bool:
    """Whether an answer names one of the tools next to arguments, or where a call has its name."""
    return any(_looks_called(text, name) for name in schemas if name in text) or any(
        _is_call(found, schemas) for found in _objects(text)
    )


def _looks_called(text: str, name: str) -> bool:
    """Whether a tool's name is followed by an object or by named arguments, or is a tag's attribute."""
    own = rf"(?<![\w-])(?:functions?\.?)?{re.escape(name)}"
    ways = (
        rf"{own}(?::\d+)?\s*+(?:(?:<[^<>\n]*>|```)\s*+)?(?:json\s*+)?\{{",  # functions.NAME:0 {"a": 1}
        rf"{own}(?:\.call)?\(\s*\w+\s*=",  # NAME(a=1)
        rf"<[\w:.|-]+(?:\s+\w+)?\s*=\s*[\"']?{re.escape(name)}[\"']?[\s/>]",  # <function=NAME>, <invoke name="NAME">
        rf"{own}\s*<arg_key>",
        rf"(?m)^[^\S\n]*+Action\s*+:\s*+{re.escape(name)}[^\S\n]*+$",
    )
    return any(re.search(way, text) for way in ways)


def _objects(text: str) -> Iterator[Any]:
    """Return the JSON objects in a text, only the outermost."""
    at = text.find("{")
    for _ in range(_MOST_OBJECTS):
        if at < 0:
            return
        try:
            value, end = json_at(text, at)
        except (ValueError, RecursionError):
            value, end = None, at + 1
        yield value
        at = text.find("{", end)


def _is_call(value: Any, schemas: Tools) -> bool:
    """Whether an object names a tool and has arguments, under the keys that models use for both."""
    if not isinstance(value, dict):
        return False
    inner = value.get("function")
    if isinstance(inner, dict):
        return _is_call(inner, schemas)
    named = any(isinstance(value.get(word), str) and value[word] in schemas for word in _NAMES)
    return named and any(word in value for word in _ARGUMENTS)
