"""The content of a request in a form that can be compared; and how two of them differ.

Messages are compared by meaning, as in `prompt.equality`. Of the parameters, those that shape an answer are compared.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from lightning_spans.chat.body import messages_of
from lightning_trainer.gateway.prompt.equality import Conversation, same_data

# Parameters that shape an answer, with their defaults.
_SHAPING: Final[Mapping[str, Any]] = {
    "n": 1, "temperature": None, "top_p": 1, "top_k": None, "min_p": 0, "presence_penalty": 0,
    "frequency_penalty": 0, "repetition_penalty": 1, "logit_bias": None, "stop": None, "response_format": None,
    "tool_choice": None, "reasoning_effort": None, "previous_response_id": None, "text": None,
}  # fmt: skip
_LIMITS: Final = ("max_completion_tokens", "max_tokens", "max_output_tokens")
_SHOWN: Final = 60  # characters of a text in a message
# What differs between runs by itself, the most specific first.
_KINDS: Final[Sequence[tuple[str, re.Pattern[str]]]] = (
    ("an id", re.compile(r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b", re.IGNORECASE)),
    ("a time of day", re.compile(r"(?<!\d)\d{1,2}:\d{2}(:\d{2}(\.\d+)?)?\b")),
    ("a date and time", re.compile(r"\b\d{4}-\d{2}-\d{2}[T ]\d{1,2}:\d{2}(:\d{2}(\.\d+)?)?\b")),
    ("a date", re.compile(r"\b(\d{4}-\d{2}-\d{2}|\d{1,2}[./]\d{1,2}[./]\d{2,4})\b")),
    ("an address in memory", re.compile(r"\b0x[0-9a-f]{6,}\b", re.IGNORECASE)),
    ("an id", re.compile(r"\b(?=[0-9a-f]*\d)(?=\d*[a-f])[0-9a-f]{8,}\b", re.IGNORECASE)),
    ("a number", re.compile(r"(?<![\w.])-?\d+(\.\d+)?(e-?\d+)?(?![\w])", re.IGNORECASE)),
)
_WORD: Final = re.compile(r"\w+")
_ORDINALS: Final = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth")


@dataclass(frozen=True, slots=True)
class RequestContent:
    """The content of a request.

    Attributes:
        lines: each message as one text, equal if it means the same.
        shown: each message for people: its role and its text.
        tools: those offered, by name: their descriptions as one text each.
        parameters: those that shape the answer, as texts.
        key: digest of all of it.
    """

    lines: tuple[str, ...]
    shown: tuple[tuple[str, str], ...]
    tools: Mapping[str, str]
    parameters: Mapping[str, str]
    key: bytes


def read_request(body: Mapping[str, Any]) -> RequestContent:
    """Read the body of a request on any surface."""
    messages = messages_of(body) or []
    conversation = Conversation()
    lines = tuple(_line(conversation, message) for message in messages)
    tools = {_tool_name(tool): same_data(tool) for tool in body.get("tools") or () if isinstance(tool, Mapping)}
    parameters = {
        name: same_data(_plain(body[name]))
        for name, usual in _SHAPING.items()
        if body.get(name) not in (None, usual, [], {}) and not (name == "tool_choice" and body[name] == "auto")
    }
    if limit := next((body[name] for name in _LIMITS if body.get(name) is not None), None):
        parameters["max_tokens"] = same_data(limit)
    whole = json.dumps([_sort_results(lines, messages), sorted(tools.items()), sorted(parameters.items())])
    shown = tuple(_role_and_text(message) for message in messages)
    return RequestContent(lines, shown, tools, parameters, hashlib.blake2b(whole.encode(), digest_size=16).digest())


def _sort_results(lines: Sequence[str], messages: Sequence[Any]) -> list[str]:
    """Sort consecutive tool results, because some frameworks send them in the order of their arrival."""
    settled: list[str] = []
    for is_result, both in itertools.groupby(zip(lines, messages, strict=True), key=lambda pair: _is_result(pair[1])):
        group = [line for line, _ in both]
        settled += sorted(group) if is_result else group
    return settled


def _is_result(message: Any) -> bool:
    return isinstance(message, Mapping) and (
        message.get("role") == "tool" or str(message.get("type", "")).endswith("call_output")
    )


def _plain(value: Any) -> Any:
    # one stop string is a list of one; a text is never parsed as JSON
    return [value] if isinstance(value, str) else value


def _line(conversation: Conversation, message: Any) -> str:
    said = isinstance(message, Mapping) and isinstance(message.get("role"), str)
    if said and message.get("type", "message") == "message":
        try:
            return conversation.line(message)
        except (AttributeError, TypeError):  # of a format that no surface accepts; compared as it is
            pass
    return same_data(message)


def _role_and_text(message: Any) -> tuple[str, str]:
    if not isinstance(message, Mapping):
        return "user", str(message)
    content = message.get("content")
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, Mapping)]
        content = "\n".join(part for part in parts if isinstance(part, str)) or same_data(content)
    calls = [call.get("function") or call for call in message.get("tool_calls") or () if isinstance(call, Mapping)]
    texts = [content] if isinstance(content, str) and content else []
    texts += [f"{call.get('name')}({call.get('arguments')})" for call in calls if isinstance(call, Mapping)]
    if not texts:
        rest = {name: value for name, value in message.items() if name not in ("role", "type", "id", "status")}
        texts = [same_data(rest)] if rest else []
    return str(message.get("role") or message.get("type") or "message"), "\n".join(texts)


def _tool_name(tool: Mapping[str, Any]) -> str:
    inner = tool.get("function")
    return str((inner if isinstance(inner, Mapping) else tool).get("name") or tool.get("type"))


def difference(recorded: RequestContent, now: RequestContent) -> str:
    """Return the first difference between a request and the recorded one, as the end of a sentence."""
    for number, (old, new) in enumerate(zip(recorded.lines, now.lines, strict=False), 1):
        if old != new:
            (old_role, old_text), (role, text) = recorded.shown[number - 1], now.shown[number - 1]
            if old_role != role:
                return f"message {number} differs: its role is {role!r} and was {old_role!r}"
            return f"message {number} ({role}) differs: {_texts_differ(old_text, text)}"
    before, after = len(recorded.lines), len(now.lines)
    if before != after:
        more = now.shown[before] if after > before else recorded.shown[after]
        said = f"the {'new' if after > before else 'missing'} one is {more[0]}: {_cut(more[1])}"
        return f"it has {after} messages, but had {before}; {said}"
    if recorded.tools != now.tools:
        return f"its tools differ: {_names_differ(recorded.tools, now.tools)}"
    if recorded.parameters != now.parameters:
        return f"its parameters differ: {_names_differ(recorded.parameters, now.parameters)}"
    return "it is a repetition"


def _names_differ(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    found = [f"{name} is new" for name in after if name not in before]
    found += [f"{name} is gone" for name in before if name not in after]
    for name in after:
        if name in before and before[name] != after[name]:
            short = len(before[name]) + len(after[name]) < _SHOWN
            found.append(f"{name} is {after[name]} and was {before[name]}" if short else f"{name} is another")
    return ", ".join(found[:4])


def _texts_differ(old: str, new: str) -> str:
    """Return how two texts differ, and the kind of what differs if it can be determined."""
    start = 0
    while start < min(len(old), len(new)) and old[start] == new[start]:
        start += 1
    end = 0
    while end < min(len(old), len(new)) - start and old[-1 - end] == new[-1 - end]:
        end += 1
    kind = next((name for name, pattern in _KINDS if _inside(pattern, old, new, start, end)), None)
    if kind is None and sorted(_WORD.findall(old)) == sorted(_WORD.findall(new)):
        kind = "the order of the same words"
    left = start
    while left > 0 and not old[left - 1].isspace() and start - left < 20:
        left -= 1
    told = f"{_cut(new[left:])} and was {_cut(old[left:])}"
    return f"{kind}, now {told}" if kind is not None else f"it is {told}"


def _inside(pattern: re.Pattern[str], old: str, new: str, start: int, end: int) -> bool:
    """Whether all differences are within something of this kind, in both texts."""

    def covers(text: str) -> bool:
        return any(found.start() <= start and found.end() >= len(text) - end for found in pattern.finditer(text))

    return covers(old) and covers(new)


def _cut(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "...")


def ordinal(number: int) -> str:
    """Return a position, counted from 0, as a word."""
    return _ORDINALS[number] if number < len(_ORDINALS) else f"{number + 1}th"
