"""What a program gives its agents: system prompts, as digests by which a change is seen."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, Final

Json = Any
_SYSTEM: Final = frozenset({"system", "developer"})
_DIGITS: Final = 16


def digest(text: str) -> str:
    """Return 16 hex digits that stand for a text."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:_DIGITS]


def system_prompt(request: Mapping[str, Json]) -> str:
    """Return the system prompt of a request, whatever surface it came by; empty where it has none."""
    return "\n".join(_system_texts(request))


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
