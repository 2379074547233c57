"""The text around a call's name and arguments, taken from a call that the model's own chat template wrote.

With it a call can be forced in any format: see `lightning_trainer.gateway.request.forced_calls`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from lightning_spans.schema.json import dumps
from lightning_trainer.gateway.formats.calls import json_at, parameters_of
from lightning_trainer.gateway.formats.probe import NAME, Form, Template, common_start
from lightning_trainer.gateway.formats.table import Format
from lightning_trainer.gateway.http.errors import Refusal

NINE_LETTERS: Final = "callprobe"  # placeholder in a frame for a call's id
_SAID: Final = "lightning_probe_said"
_NUMBER, _WORD, _LAST = "31337", "lightning_probe_word", "31338"
_KEYS: Final = ("lightning_a", "lightning_b", "lightning_c")  # as a template would sort them
_ARGUMENTS: Final = dict(zip(_KEYS, (int(_NUMBER), _WORD, int(_LAST)), strict=True))


@dataclass(frozen=True, slots=True)
class Pairs:
    """Arguments that are written one by one.

    Attributes:
        first: before the first key.
        joint: before each other key.
        key: between a key and a value in JSON.
        close: after such a value.
        key_of_text: between a key and a value that is plain text; None: texts are JSON too.
        close_of_text: after such a value.
        empty: if there is no argument.
        objects: whether a JSON value that is or contains an object can be read.
    """

    first: str
    joint: str
    key: str
    close: str
    key_of_text: str | None
    close_of_text: str
    empty: str
    objects: bool


@dataclass(frozen=True, slots=True)
class CallFrame:
    """How calls are written.

    Attributes:
        begin: before the first name.
        middle: between a name and its arguments.
        between: between the arguments of a call and the next name; None: an answer has one call.
        end: after the last arguments.
        pairs: how arguments are written; None: as one JSON object.
        separators: of an item and of a key in that object.
        tokens: parts of these texts that are single tokens, which llguidance never matches as letters, by their texts.
    """

    begin: str
    middle: str
    between: str | None
    end: str
    pairs: Pairs | None = None
    separators: tuple[str, str] = (", ", ": ")
    tokens: Mapping[str, int] | None = None


HERMES: Final = CallFrame(
    begin='<tool_call>\n{"name": "',
    middle='", "arguments": ',
    between='}\n</tool_call>\n<tool_call>\n{"name": "',
    end="}\n</tool_call>",
)


def frame_of(
    template: Template, calls: Format, form: Form, tokens: Mapping[str, int], controls: Collection[str]
) -> CallFrame | None:
    """Return how a template writes calls; None if it cannot be determined.

    Args:
        template: renders messages and tools.
        calls: the format that reads them.
        form: how the template expects them.
        tokens: those that were added to the tokenizer's vocabulary, by their texts.
        controls: texts of the control tokens among them.
    """
    for call_id in (NINE_LETTERS, f"functions.{NAME}:0"):
        write = _Writer(template, calls, form, tokens, controls, call_id)
        try:
            return _parse_frame(write)
        except (Refusal, ValueError, KeyError, TypeError, IndexError):
            continue
    return None


@dataclass(frozen=True, slots=True)
class _Writer:
    """Renders calls with the template, and cuts out what the model would write."""

    template: Template
    calls: Format
    form: Form
    tokens: Mapping[str, int]
    controls: Collection[str]
    call_id: str

    def __call__(self, *arguments: Mapping[str, Any]) -> str:
        """Return calls of the probe's tool with these arguments, from the format's first mark to the turn's end."""
        kinds = {int: "integer", str: "string"}
        schema = {"type": "object", "properties": {key: {"type": kinds[type(_ARGUMENTS[key])]} for key in _KEYS}}
        tool = {"type": "function", "function": {"name": NAME, "description": "A probe.", "parameters": schema}}
        user = {"role": "user", "content": _SAID}
        called = {
            "role": "assistant",
            "content": self.form.content,
            "tool_calls": [self._call(at, each) for at, each in enumerate(arguments)],
        }
        whole = self.template([dict(user), called], [tool], prompt=False).rpartition(_SAID)[2]
        drawn = self.template([dict(user)], [tool], prompt=True).rpartition(_SAID)[2]
        begun = common_start(whole, drawn)
        spots = [place for mark in self.calls.marks if (place := whole.find(mark, begun)) >= 0]
        answer = whole[min(spots, default=len(whole)) :]
        ends = [place for text in self.controls if text not in self._own() and (place := answer.find(text)) >= 0]
        answer = answer[: min(ends, default=len(answer))].rstrip()
        read, _ = self.calls.read(answer, parameters_of([tool]))
        if [(call.name, call.arguments) for call in read] != [(NAME, each) for each in arguments]:
            raise ValueError("another call is read")
        return answer

    def _own(self) -> frozenset[str]:
        marks = "".join(self.calls.marks)
        return frozenset({*self.calls.controls, *(text for text in self.controls if text in marks)})

    def _call(self, at: int, arguments: Mapping[str, Any]) -> dict[str, Any]:
        shown: Any = dict(arguments) if self.form.arguments == "data" else dumps(arguments).decode()
        call_id = re.sub(r":0$", f":{at}", self.call_id)
        return {"id": call_id, "type": "function", "function": {"name": NAME, "arguments": shown}}

    def reads(self, text: str, value: Any) -> bool:
        """Whether a call whose first argument has this value is read."""
        kind = {"type": "object" if isinstance(value, dict) else "array"}
        tools = {NAME: {_KEYS[0]: kind, _KEYS[1]: {"type": "string"}, _KEYS[2]: {"type": "integer"}}}
        try:
            read, _ = self.calls.read(text, tools)
        except (ValueError, KeyError, TypeError, IndexError, RecursionError):
            return False
        return [call.arguments.get(_KEYS[0]) for call in read] == [value]


def _parse_frame(write: _Writer) -> CallFrame:
    """Split rendered calls into their parts.

    Raises:
        ValueError: the parts cannot be determined.
    """
    one = write(_ARGUMENTS)
    begin, rest = _parts(one, NAME)
    middle, end, pairs, separators = _as_object(rest) or _as_pairs(write, begin, rest)
    between = _between(write, begin, rest, end)
    shown = f"{one}{between}"
    tokens = {text: number for text, number in write.tokens.items() if text in shown}
    return CallFrame(begin, middle, between, end, pairs, separators, tokens)


def _parts(text: str, *words: str) -> list[str]:
    """Return the text before, between and after words that occur once each, in this order.

    Raises:
        ValueError: they do not.
    """
    found, at = [], 0
    for word in words:
        if text.count(word) != 1:
            raise ValueError(f"{word} is there {text.count(word)} times")
        place = text.index(word, at)
        found.append(text[at:place])
        at = place + len(word)
    return [*found, text[at:]]


_Arguments: TypeAlias = tuple[str, str, Pairs | None, tuple[str, str]]


def _as_object(rest: str) -> _Arguments | None:
    """Parse arguments that are one JSON object; None if they are not."""
    for found in re.finditer(r"\{", rest):
        try:
            value, end = json_at(rest, found.start())
        except ValueError:
            continue
        if value == _ARGUMENTS:
            _, colon, comma, *_ = _parts(rest, f'"{_KEYS[0]}"', _NUMBER, f'"{_KEYS[1]}"')
            return rest[: found.start()], rest[end:], None, (comma, colon)
    return None


def _as_pairs(write: _Writer, begin: str, rest: str) -> _Arguments:
    """Parse arguments that are written one by one.

    Raises:
        ValueError: their parts cannot be determined.
    """
    words = (_KEYS[0], _NUMBER, _KEYS[1], _WORD, _KEYS[2], _LAST)
    first, key, joint, key_of_text, joint_of_text, key_again, end = _parts(rest, *words)
    close_of_text = joint_of_text.removesuffix(joint)
    if key != key_again or not joint_of_text.endswith(joint):
        raise ValueError("arguments are not written alike")
    close, quoted = "", close_of_text in {'"', "'"}
    if not close_of_text:
        close = close_of_text = joint[: joint.find(">") + 1]
        joint = joint.removeprefix(close)
    if not quoted and "<" not in close_of_text:
        raise ValueError("nothing ends a string")
    if not end.startswith(close):
        raise ValueError("the last argument ends otherwise")
    end = end.removeprefix(close)
    empty = _parts(write({}), NAME)[1]
    if not empty.endswith(end):
        raise ValueError("a call without arguments has another end")
    deep = '{"x": [{"y": "z"}]}'
    text = f"{begin}{NAME}{first}{_KEYS[0]}{key}{deep}{close}{end}"
    pairs = Pairs(
        first, joint, key, close, None if quoted else key_of_text, close_of_text, empty.removesuffix(end),
        objects=write.reads(text, {"x": [{"y": "z"}]}),
    )  # fmt: skip
    return "", end, pairs, (", ", ": ")


def _between(write: _Writer, begin: str, rest: str, end: str) -> str | None:
    """Return the text between two calls; None if the template writes only one, or two in another way."""
    arguments = rest.removesuffix(end)
    try:
        before, one, other = _two(write(_ARGUMENTS, _ARGUMENTS))
    except (Refusal, ValueError, KeyError, TypeError, IndexError):
        return None
    return one.removeprefix(arguments) if (before, other) == (begin, rest) and one.startswith(arguments) else None


def _two(text: str) -> tuple[str, str, str]:
    before, one, other = text.split(NAME)
    return before, one, other
