"""The Hermes format of tool calls, read as vLLM's parser reads it: any fault, and the whole answer is plain content.

A call is a JSON object between two tags: ``<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>``.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

_TAG: Final = "<tool_call>"
_CALL: Final = re.compile(r"<tool_call>(.*?)</tool_call>|<tool_call>(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Answer:
    """A model's text, taken apart.

    Attributes:
        content: what stands before the first call; None when a call stands first; all of it when there is no call.
        tool_calls: in OpenAI's shape, their arguments as JSON text.
    """

    content: str | None
    tool_calls: tuple[Mapping[str, Any], ...] = ()

    def message(self) -> dict[str, Any]:
        """Give the message in OpenAI's shape."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.tool_calls:
            message["tool_calls"] = list(self.tool_calls)
        return message


def parse(text: str) -> Answer:
    """Take the tool calls out of a model's whole answer. A last call without its closing tag counts too."""
    if _TAG not in text:
        return Answer(text)
    try:
        calls = tuple(_read(closed or rest) for closed, rest in _CALL.findall(text))
    except (ValueError, TypeError, KeyError, RecursionError):
        return Answer(text)
    return Answer(text[: text.index(_TAG)] or None, calls)


def _read(body: str) -> dict[str, Any]:
    call = json.loads(body, parse_constant=_no_number)
    name = call["name"]
    if not isinstance(name, str):
        raise TypeError(f"name {name!r}")
    arguments = json.dumps(call["arguments"], ensure_ascii=False)
    return {
        "id": f"call_{os.urandom(12).hex()}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is not JSON")  # Python would write it back as it is, and no client could read it


class StreamParser:
    """Takes an answer apart while it is drawn: content goes out at once, calls only when the answer is whole.

    Calls wait because a later fault makes all of it plain content, and what was sent can't be taken back. So a streamed
    answer is always the same as the one sent whole.
    """

    def __init__(self, *, tools: bool) -> None:
        self._tools = tools
        self._parts: list[str] = []
        self._held = ""  # the end of the text, from where a tag begins or may begin
        self._found = False

    @property
    def text(self) -> str:
        """All that was fed."""
        return "".join(self._parts)

    def feed(self, text: str) -> str:
        """Take more text, give the content that can be sent now."""
        self._parts.append(text)
        if not self._tools:
            return text
        self._held += text
        if self._found:
            return ""
        at = self._held.find(_TAG)
        self._found = at >= 0
        cut = at if self._found else len(self._held) - _overlap(self._held)
        out, self._held = self._held[:cut], self._held[cut:]
        return out

    def close(self) -> tuple[str, Answer]:
        """End the answer: give the content that was not sent yet, and the whole answer."""
        if not self._tools:
            return "", Answer(self.text)
        answer = parse(self.text)
        return ("" if answer.tool_calls else self._held), answer


def _overlap(text: str) -> int:
    """Length of the longest end of `text` that is a beginning of the tag."""
    return next((size for size in range(min(len(_TAG) - 1, len(text)), 0, -1) if text.endswith(_TAG[:size])), 0)
