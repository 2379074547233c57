"""Splits an answer into reasoning, content and tool calls, whole or while it is sampled, with the same result.

Content and reasoning are sent at once. Calls wait for the end of the answer: a later error turns all of them into plain
content, exactly as sampled, and what was sent cannot be taken back.
"""

from __future__ import annotations

import json
import os
import secrets
import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from lightning_spans.chat.body import tool_call
from lightning_trainer.gateway.formats.calls import Tools, WrittenCall, parameters_of
from lightning_trainer.gateway.formats.table import Format, Thinking

# Before the text of a control token, so that ordinary letters are never mistaken for it. It is half of a pair, which no
# tokenizer produces.
SIGN: Final = "\ud800"
_NINE: Final = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """A model's text, split into parts.

    Attributes:
        content: what is neither reasoning nor calls; None if there are calls and nothing else.
        tool_calls: in OpenAI's format, their arguments as JSON text.
        reasoning: the reasoning; None if there is none.
        left: text next to the calls that the message does not contain.
    """

    content: str | None
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    reasoning: str | None = None
    left: str = ""

    def message(self) -> dict[str, Any]:
        """Return the message in OpenAI's format."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = list(self.tool_calls)
        return message


@dataclass(frozen=True, slots=True)
class Dialect:
    """How one model writes, as far as a reader needs it.

    Attributes:
        calls: format of its tool calls; None: none are read.
        thinking: how it writes reasoning; None: it has none.
        kept: texts of the format's marks that are control tokens of its tokenizer, by token.
    """

    calls: Format | None = None
    thinking: Thinking | None = None
    kept: Mapping[int, str] = field(default_factory=dict)


class AnswerReader:
    """Reads one answer.

    Args:
        dialect: of the model.
        tools: of the request; without any, no calls are looked for.
        opened: whether the prompt ends within reasoning.
    """

    def __init__(self, dialect: Dialect, tools: Sequence[Mapping[str, Any]] = (), *, opened: bool = False) -> None:
        calls, marks = dialect.calls, tuple(dialect.kept.values())
        self._format = calls if calls is not None and tools else None
        self._tools: Tools = parameters_of(tools)
        self._thinking = dialect.thinking and Thinking(
            add_signs(dialect.thinking.open, marks), add_signs(dialect.thinking.close, marks)
        )
        self._marks = tuple(add_signs(mark, marks) for mark in self._format.marks) if self._format else ()
        self._dropped = tuple(add_signs(mark, marks) for mark in calls.dropped) if calls else ()
        self._anywhere = calls is not None and calls.anywhere
        self._parts: list[str] = []
        self._held = ""  # received and not sent
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._phase = "content" if self._thinking is None or self._anywhere else "start"
        self._thought = self._opened = opened and self._phase == "start"

    @property
    def text(self) -> str:
        """The whole text so far."""
        return plain("".join(self._parts))

    @property
    def thinks(self) -> bool:
        """Whether the next text belongs to the reasoning."""
        return self._phase == "thinking" or (self._phase == "start" and self._opened)

    @property
    def partial(self) -> ParsedAnswer:
        """What was sent so far, and what is held back as content."""
        content = "".join(self._content) + plain(self._held)
        return ParsedAnswer(content, (), "".join(self._reasoning) or None)

    def feed(self, text: str) -> tuple[str, str]:
        """Add text; return the reasoning and the content that can be sent now."""
        self._parts.append(text)
        self._held += text
        reasoned, said = len(self._reasoning), len(self._content)
        while self._step():
            pass
        return "".join(self._reasoning[reasoned:]), "".join(self._content[said:])

    def _step(self) -> bool:
        """Read one more part of the answer; False if nothing can be decided yet."""
        if self._phase == "start":
            return self._start()
        if self._phase == "thinking":
            return self._think()
        return self._phase == "content" and self._say()

    def _start(self) -> bool:
        if self._thinking is None:
            return False
        begun = self._held.lstrip()
        if begun.startswith(self._thinking.open):
            self._held, self._phase, self._thought = begun[len(self._thinking.open) :], "thinking", True
        elif self._thinking.open.startswith(begun):
            return False
        else:
            self._phase = "thinking" if self._opened else "content"
        return True

    def _think(self) -> bool:
        """Send reasoning up to its end. A call in it waits: it counts only if the reasoning never ends."""
        if self._thinking is None:
            return False
        end = self._held.find(self._thinking.close)
        if end >= 0:
            self._reason(self._held[:end].rstrip("\n"))
            self._held, self._phase = self._held[end + len(self._thinking.close) :], "content"
            return True
        marks = () if self._anywhere or (self._format and self._format.first_only) else self._marks
        spots = [place for mark in marks if (place := self._held.find(mark)) >= 0]
        cut = min(spots) if spots else len(self._held) - _overlap(self._held, (self._thinking.close, *marks))
        cut = len(self._held[:cut].rstrip("\n"))
        self._reason(self._held[:cut])
        self._held = self._held[cut:]
        return False

    def _reason(self, text: str) -> None:
        if not self._reasoning:
            text = text.lstrip("\n")
        if text:
            self._reasoning.append(plain(text))

    def _say(self) -> bool:
        """Send content up to the next mark."""
        if self._format is not None and self._format.first_only:
            return self._say_unless_first()
        openers = (self._thinking.open,) if self._anywhere and self._thinking else ()
        marks = (*self._marks, *self._dropped, *openers)
        spots = [(place, -len(mark), mark) for mark in marks if (place := self._held.find(mark)) >= 0]
        if not spots:
            self._speak(len(self._held) - _overlap(self._held, marks))
            return False
        place, _, mark = min(spots)
        longer = [each for each in marks if len(each) > len(mark) and each.startswith(self._held[place:])]
        if longer:  # it may be the beginning of another mark
            self._speak(place)
            return False
        self._speak(place)
        if mark in self._marks:
            self._phase = "calls"
            return False
        self._held = self._held[self._held.index(mark) + len(mark) :]
        if mark in openers:
            self._phase = "thinking"
            if self._reasoning:
                self._reasoning.append("\n")
        return True

    def _say_unless_first(self) -> bool:
        begun = self._held.lstrip()
        if not self._content and any(begun.startswith(mark) for mark in self._marks):
            self._phase = "calls"
        elif self._content or not any(mark.startswith(begun) for mark in self._marks):
            self._speak(len(self._held))
        return False

    def _speak(self, cut: int) -> None:
        """Send content. White space before its first word waits, and is dropped if reasoning comes before it."""
        text = self._held[:cut]
        if not self._content:
            if not text.strip():
                if text and self._thought:
                    self._held = self._held[cut:]
                return
            text = text.lstrip() if self._thought or self._dropped else text
        if text:
            self._content.append(plain(text))
        self._held = self._held[cut:]

    def close(self) -> tuple[tuple[str, str], ParsedAnswer]:
        """End the answer: return reasoning and content that were not sent yet, and the whole answer."""
        written, left = self._calls()
        reasoned, said = "", ""
        if not written:
            unfinished = self._dropped and any(mark.startswith(self._held) for mark in self._dropped)
            held, self._held = "" if unfinished else plain(self._held), ""
            if self.thinks:
                reasoned = held if self._reasoning else held.lstrip("\n")
            else:
                said = held
        reasoning = "".join(self._reasoning) + reasoned
        content = "".join(self._content) + said
        return (reasoned, said), ParsedAnswer(
            (content or None) if written else content,
            tuple(self._call(call) for call in written),
            reasoning or None,
            left,
        )

    def _calls(self) -> tuple[list[WrittenCall], str]:
        """Parse the calls; none if anything is wrong with one of them."""
        if self._format is None or self._phase not in {"calls", "thinking"}:
            return [], ""
        held = self._held if self._anywhere else self._held.strip()
        if not any(held.startswith(mark) for mark in self._marks):
            return [], ""
        try:
            calls, left = self._format.read(plain(held), self._tools)
            for call in calls:
                _dump_arguments(call.arguments).encode()
        except (ValueError, KeyError, TypeError, RecursionError, IndexError):
            return [], ""
        if self._phase == "thinking" and left.strip():
            return [], ""
        ids = [call.call_id for call in calls]
        known = all(ids) and len(set(ids)) == len(ids)
        return [call if known else WrittenCall(call.name, call.arguments) for call in calls], left

    def _call(self, call: WrittenCall) -> Mapping[str, Any]:
        short = self._format is not None and self._format.nine_letters
        made = "".join(secrets.choice(_NINE) for _ in range(9)) if short else None
        return tool_call(
            call.call_id or made or f"call_{os.urandom(12).hex()}", call.name, _dump_arguments(call.arguments)
        )


def _dump_arguments(arguments: Mapping[str, Any]) -> str:
    return json.dumps(arguments, ensure_ascii=False, allow_nan=False)


def parse(
    dialect: Dialect, text: str, tools: Sequence[Mapping[str, Any]] = (), *, opened: bool = False
) -> ParsedAnswer:
    """Split a whole answer into its parts."""
    reader = AnswerReader(dialect, tools, opened=opened)
    reader.feed(text)
    return reader.close()[1]


def _overlap(text: str, marks: Sequence[str]) -> int:
    """Length of the longest end of `text` with which a mark begins."""
    longest = max((len(mark) - 1 for mark in marks), default=0)
    return next(
        (
            size
            for size in range(min(longest, len(text)), 0, -1)
            if any(mark.startswith(text[-size:]) for mark in marks)
        ),
        0,
    )


def add_signs(text: str, kept: Iterable[str]) -> str:
    """Return a text with the sign before each control token's text."""
    for mark in kept:
        text = text.replace(mark, f"{SIGN}{mark}")
    return text


def plain(text: str) -> str:
    """Return a text without signs."""
    return text.replace(SIGN, "") if SIGN in text else text
