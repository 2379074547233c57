"""Detects the format in which a model writes calls from its chat template, which is rendered with one.

No model names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

from lightning_spans.schema.json import dumps
from lightning_trainer.gateway.formats.calls import parameters_of
from lightning_trainer.gateway.formats.table import Format, Thinking, formats
from lightning_trainer.gateway.http.errors import Refusal


class Template(Protocol):
    """Renders messages and tools, optionally followed by the beginning of an answer."""

    def __call__(self, messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]], *, prompt: bool) -> str:
        """Return the text."""
        ...


NAME: Final = "lightning_probe_tool"
_SAID: Final = "lightning_probe_said"
_THOUGHT: Final = "lightning_probe_thought"
_REPLY: Final = "lightning_probe_reply"
_RESULT: Final = "lightning_probe_result"
_ARGUMENTS: Final = {"a": 1, "b": "7"}
_SCHEMA: Final = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}
TOOL: Final[Mapping[str, Any]] = {
    "type": "function",
    "function": {"name": NAME, "description": "A probe.", "parameters": _SCHEMA},
}
_USER: Final = {"role": "user", "content": _SAID}


@dataclass(frozen=True, slots=True)
class Form:
    """How a template expects a message with calls.

    Attributes:
        arguments: as data, or as JSON text.
        content: of a message without content: an empty text or None.
    """

    arguments: Literal["data", "text"] = "data"
    content: Literal[""] | None = ""


_FORMS: Final = tuple(Form(arguments, content) for content in ("", None) for arguments in ("data", "text"))


def takes_tools(template: Template) -> bool:
    """Whether a template shows tools to the model."""
    try:
        return NAME in template([{"role": "user", "content": "hi"}], [TOOL], prompt=True)
    except Refusal:
        return False


def detect_format(template: Template, source: str, controls: Sequence[str]) -> tuple[Format, Form] | None:
    """Return the format in which a template writes calls, and how it expects them; None if no known format matches.

    Args:
        template: renders messages and tools.
        source: of the template.
        controls: texts of the tokenizer's control tokens.
    """
    thinking = thinking_of(template, source, None)[0]
    begun = _answer_beginnings(template)
    for form in _FORMS:
        for text in _written_calls(template, form):
            found = _find_format(text, begun, thinking, controls)
            if found is not None:
                return found, form
    return None


def _answer_beginnings(template: Template) -> tuple[str, ...]:
    """Return what a template writes before an answer: one to be sampled, and one already given."""
    try:
        drawn = template([dict(_USER)], [TOOL], prompt=True).rpartition(_SAID)[2]
    except Refusal:
        drawn = ""
    return drawn, _plainly(template)


def results(template: Template, form: Form) -> str | None:
    """Return why a tool's result never reaches the model; None if it does."""
    shown = list(_try_ids(template, form, with_result=True))
    if any(_RESULT in text for text in shown if isinstance(text, str)):
        return None
    refusals = [text.message for text in shown if isinstance(text, Refusal)]
    return refusals[0] if len(refusals) == len(shown) else "the chat template does not show the results of tools"


def writes_calls(template: Template) -> bool:
    """Whether a template writes the calls of an answer at all."""
    return any(NAME in text for form in _FORMS for text in _written_calls(template, form))


def _written_calls(template: Template, form: Form) -> Iterator[str]:
    """Return what a template writes for an answer with a call, with and without the tool's result."""
    found = (*_try_ids(template, form, with_result=False), *_try_ids(template, form, with_result=True))
    return (text for text in found if isinstance(text, str))


def _try_ids(template: Template, form: Form, *, with_result: bool) -> Iterator[str | Refusal]:
    """Return what a template writes after the question, or its rejection, for each kind of call id."""
    arguments: Any = _ARGUMENTS if form.arguments == "data" else dumps(_ARGUMENTS).decode()
    for call_id in ("callprobe", f"functions.{NAME}:0"):  # Mistral's have nine letters; Kimi's name the tool
        call = {"id": call_id, "type": "function", "function": {"name": NAME, "arguments": arguments}}
        called = {"role": "assistant", "content": form.content, "tool_calls": [call]}
        result = {"role": "tool", "name": NAME, "tool_call_id": call_id, "content": _RESULT}
        messages: list[dict[str, Any]] = [dict(_USER), called, *([result] if with_result else [])]
        try:
            yield template(messages, [TOOL], prompt=with_result).rpartition(_SAID)[2]
        except Refusal as refusal:
            yield refusal


def _find_format(text: str, begun: Sequence[str], thinking: Thinking | None, controls: Sequence[str]) -> Format | None:
    tools = parameters_of([TOOL])
    for each in formats():
        others = [one for one in controls if one not in each.controls and not any(one in mark for mark in each.marks)]
        cleaned, before = _without(text, others), [_without(one, others) for one in begun]
        spots = {place.start() for mark in each.marks for place in re.finditer(re.escape(mark), cleaned)}
        for spot in sorted(spots):
            if not _answers_with(cleaned[:spot], before, (thinking, each.thinking, *_KNOWN)):
                continue
            try:
                calls, _ = each.read(cleaned[spot:].rstrip(), tools)
            except (ValueError, KeyError, TypeError, IndexError, RecursionError):
                continue
            if [(call.name, dict(call.arguments)) for call in calls] == [(NAME, _ARGUMENTS)]:
                return each
    return None


def _answers_with(lead: str, begun: Sequence[str], thinkings: Sequence[Thinking | None]) -> bool:
    """Whether an answer begins with the following text.

    The text before it then belongs to the prompt, or is empty reasoning. Anything else there, such as a word or a tag,
    is part of the call's format, which is then unknown.
    """
    marks = [mark.strip() for each in thinkings if each is not None for mark in (each.open, each.close)]
    return any(not _without(lead[common_start(lead, one) :], marks).strip() for one in begun)


def common_start(one: str, other: str) -> int:
    """Count the characters with which both texts begin."""
    differ = (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differ, min(len(one), len(other)))


def _without(text: str, parts: Sequence[str]) -> str:
    for part in parts:
        text = text.replace(part, "")
    return text


_BETWEEN: Final = re.compile(rf"(<[^<>\s/]+>|\[[A-Z_]+\])\s*{_THOUGHT}\s*(</[^<>\s]+>|\[/[A-Z_]+\])")
_KNOWN: Final = (Thinking("<think>", "</think>"), Thinking("[THINK]", "[/THINK]"))


def thinking_of(template: Template, source: str, calls: Format | None) -> tuple[Thinking | None, bool]:
    """Return how a model writes reasoning: as its template renders it, or by the marks in the template's source.

    Also return whether the template takes an answer's reasoning as a separate field; others look for it in the content.

    Args:
        template: renders messages and tools.
        source: of the template.
        calls: the format of the model's calls.
    """
    if calls is not None and calls.thinking is not None and calls.thinking.close in source:
        return calls.thinking, True
    shown = [text for text in _thoughts(template) if _THOUGHT in text and _REPLY in text]
    for text in shown:
        tags = _BETWEEN.search(text)
        if tags is not None:
            return Thinking(tags[1], tags[2]), True
    for text in shown:
        marks = _marks_around(text, _plainly(template))
        if marks is not None:
            return marks, True
    return next((each for each in _KNOWN if each.close in source), None), False


def _thoughts(template: Template) -> Iterator[str]:
    """Return what a template writes for an answer with reasoning, by each name of the field."""
    names = ("reasoning_content", "reasoning", "thinking")
    answer = {"role": "assistant", "content": _REPLY, **dict.fromkeys(names, _THOUGHT)}
    for message in (answer, {"role": "assistant", "content": _REPLY, "reasoning_content": _THOUGHT}):
        try:
            yield template([dict(_USER), message], [], prompt=False).rpartition(_SAID)[2]
        except Refusal:
            continue


def _plainly(template: Template) -> str:
    """Return what a template writes before an answer without reasoning."""
    answer = {"role": "assistant", "content": _REPLY}
    try:
        return template([dict(_USER), answer], [], prompt=False).rpartition(_SAID)[2].partition(_REPLY)[0]
    except Refusal:
        return ""


def _marks_around(text: str, plain: str) -> Thinking | None:
    """Return the marks around reasoning, whatever they are; None if two cannot be determined."""
    before, _, after = text.partition(_THOUGHT)
    begin = before[common_start(before, plain) :].strip()
    end = after.partition(_REPLY)[0].strip()
    signs = all(mark and not mark.isalnum() for mark in (begin, end))
    return Thinking(begin, end) if signs and begin != end else None
