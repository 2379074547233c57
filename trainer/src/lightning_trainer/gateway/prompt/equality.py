"""Whether two messages mean the same, however a client or framework wrote them.

The role, the text, the tool calls by name and arguments, and the call that a result answers must be equal. Agents send
messages back with ``null`` for ``""``, text as a list of parts, arguments with other spacing or order of keys, their
own ids, and their own fields. Fields that are ignored here still reach the chat template; if one of them changes the
rendered text, that is noticed there.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any, Final, NamedTuple

from lightning_trainer.gateway.formats.reader import ParsedAnswer

SYSTEM: Final = frozenset({"system", "developer"})
_NUMBER: Final = os.urandom(8).hex()  # digests exist in this process only; no text of a message begins like this


class ConversationDigest(NamedTuple):
    """Digests of a conversation so far: all of it, and without its system messages."""

    whole: bytes
    but_system: bytes


class Conversation:
    """A sequence of messages. Two conversations have equal digests if each message means the same."""

    __slots__ = ("_but_system", "_calls", "_whole")

    def __init__(self) -> None:
        self._whole, self._but_system = hashlib.blake2b(digest_size=16), hashlib.blake2b(digest_size=16)
        self._calls: dict[str, int] = {}  # ids of tool calls, in the order of their first occurrence

    def add(self, message: Mapping[str, Any]) -> ConversationDigest:
        """Add the next message."""
        line = self.line(message).encode() + b"\n"
        self._whole.update(line)
        if message["role"] not in SYSTEM:
            self._but_system.update(line)
        return ConversationDigest(self._whole.digest(), self._but_system.digest())

    def line(self, message: Mapping[str, Any]) -> str:
        """Return the next message as one text, equal if it means the same."""
        role = "system" if message["role"] in SYSTEM else message["role"]
        calls = [self._call(call) for call in message.get("tool_calls") or ()]
        answers = self._number(message.get("tool_call_id")) if role == "tool" else None
        content = message.get("content")
        return json.dumps([role, _text(content) if content else "", calls, answers])

    def _call(self, call: Mapping[str, Any]) -> list[Any]:
        function = call.get("function") or {}
        return [self._number(call.get("id")), function.get("name"), same_data(function.get("arguments"))]

    def _number(self, call_id: Any) -> int:
        return self._calls.setdefault(str(call_id), len(self._calls))

    def copy(self) -> Conversation:
        """Return an independent copy."""
        other = Conversation()
        other._whole, other._but_system, other._calls = self._whole.copy(), self._but_system.copy(), dict(self._calls)
        return other


def read(messages: Sequence[Mapping[str, Any]]) -> tuple[list[ConversationDigest], Conversation]:
    """Return the digests after each message, and the conversation."""
    conversation = Conversation()
    return [conversation.add(message) for message in messages], conversation


def same_data(value: Any) -> str:
    """Return one text for all ways to write the same JSON. Text that is not JSON stays as it is.

    Numbers count by their exact value: a JavaScript client sends 1.0 back as 1, and no two different integers become
    the same float. Keys have no order.
    """
    try:
        data = json.loads(value, parse_float=_number, parse_constant=_refuse) if isinstance(value, str) else value
        return json.dumps(data, sort_keys=True, default=_number_text)
    except (ValueError, TypeError, RecursionError, InvalidOperation):
        return f"text {value!r}"


def same_answer(one: ParsedAnswer, other: ParsedAnswer) -> bool:
    """Whether two answers differ only in how their calls are written, and in spaces, apart from reasoning."""
    return (
        (one.content or "").split() == (other.content or "").split()
        and one.left.split() == other.left.split()
        and [_meaning(call) for call in one.tool_calls] == [_meaning(call) for call in other.tool_calls]
    )


def _meaning(call: Mapping[str, Any]) -> tuple[str, str]:
    function = call["function"]
    return str(function.get("name")), same_data(function.get("arguments"))


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = [part.get("text") or part.get("refusal") for part in content if isinstance(part, Mapping)]
    whole = len(parts) == len(content) and all(isinstance(part, str) for part in parts)
    return "\n".join(str(part) for part in parts) if whole else same_data(content)


def _number(text: str) -> Any:
    number = Decimal(text)
    if number.adjusted() < 40 and number == number.to_integral_value():
        return int(number)
    return number


def _number_text(value: Any) -> str:
    if not isinstance(value, Decimal):
        raise TypeError(type(value).__name__)
    sign, figures, exponent = value.as_tuple()
    shown = "".join(map(str, figures)).rstrip("0")
    return f"{_NUMBER}{'-' * sign}{shown}e{int(exponent) + len(figures) - len(shown)}"


def _refuse(text: str) -> None:
    raise ValueError(f"{text} is not JSON")
