"""Which format a model writes: found out by its own chat template, which is asked to write a call. No model names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

from lightning_spans.schema.json import dumps
from lightning_trainer.gateway.formats.calls import parameters_of
from lightning_trainer.gateway.formats.table import FORMATS, Format, Thinking
from lightning_trainer.gateway.http.errors import Refusal


class Template(Protocol):
    """Renders messages and tools, with the beginning of an answer after them or not."""

    def __call__(self, messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]], *, prompt: bool) -> str:
        """Return the text."""
        ...


NAME: Final = "lightning_probe_tool"
_SAID: Final = "lightning_probe_said"
_THOUGHT: Final = "lightning_probe_thought"
_REPLY: Final = "lightning_probe_reply"
_ARGUMENTS: Final = {"a": 1, "b": "7"}
_SCHEMA: Final = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}
TOOL: Final[Mapping[str, Any]] = {
    "type": "function",
    "function": {"name": NAME, "description": "A probe.", "parameters": _SCHEMA},
}
_USER: Final = {"role": "user", "content": _SAID}


@dataclass(frozen=True, slots=True)
class Form:
    """How a template wants a message with calls.

    Attributes:
        arguments: as data, or as JSON text.
        content: of a message that has none: an empty text or None.
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


def chosen(template: Template, controls: Sequence[str]) -> tuple[Format, Form] | None:
    """Return the format in which a template writes calls, and how it wants them; None: it writes none that is read.

    Args:
        template: renders messages and tools.
        controls: texts of the tokenizer's control tokens.
    """
    for form in _FORMS:
        for text in _written(template, form):
            found = _reading(text, controls)
            if found is not None:
                return found, form
    return None


def writes_calls(template: Template) -> bool:
    """Whether a template writes the calls of an answer at all."""
    return any(NAME in text for form in _FORMS for text in _written(template, form))


def _written(template: Template, form: Form) -> Iterator[str]:
    """Return what a template writes of an answer with a call, with and without the tool's result."""
    arguments: Any = _ARGUMENTS if form.arguments == "data" else dumps(_ARGUMENTS).decode()
    for call_id in ("callprobe", f"functions.{NAME}:0"):  # Mistral's are nine letters; Kimi's name the tool
        call = {"id": call_id, "type": "function", "function": {"name": NAME, "arguments": arguments}}
        called = {"role": "assistant", "content": form.content, "tool_calls": [call]}
        result = {"role": "tool", "name": NAME, "tool_call_id": call_id, "content": "ok"}
        tries: tuple[tuple[list[dict[str, Any]], bool], ...] = (
            ([_USER, called], False),
            ([_USER, called, result], True),
        )
        for messages, prompt in tries:
            try:
                yield template([dict(message) for message in messages], [TOOL], prompt=prompt).rpartition(_SAID)[2]
            except Refusal:
                continue


def _reading(text: str, controls: Sequence[str]) -> Format | None:
    tools = parameters_of([TOOL])
    for each in FORMATS:
        cleaned = text
        for control in controls:
            if control not in each.controls and not any(control in mark for mark in each.marks):
                cleaned = cleaned.replace(control, "")
        spots = {place.start() for mark in each.marks for place in re.finditer(re.escape(mark), cleaned)}
        for spot in sorted(spots):
            try:
                calls, _ = each.read(cleaned[spot:].rstrip(), tools)
            except (ValueError, KeyError, TypeError, IndexError, RecursionError):
                continue
            if [(call.name, dict(call.arguments)) for call in calls] == [(NAME, _ARGUMENTS)]:
                return each
    return None


_BETWEEN: Final = re.compile(rf"(<[^<>\s/]+>|\[[A-Z_]+\])\s*{_THOUGHT}\s*(</[^<>\s]+>|\[/[A-Z_]+\])")
_KNOWN: Final = (Thinking("<think>", "</think>"), Thinking("[THINK]", "[/THINK]"))


def thinking_of(template: Template, source: str, calls: Format | None) -> tuple[Thinking | None, bool]:
    """Return how a model writes reasoning: as its template writes an answer's, or by the marks that it knows of.

    Also whether the template takes an answer's reasoning as a field of its own; others look for it in the content.

    Args:
        template: renders messages and tools.
        source: of the template.
        calls: the format of the model's calls.
    """
    if calls is not None and calls.thinking is not None and calls.thinking.close in source:
        return calls.thinking, True
    names = ("reasoning_content", "reasoning", "thinking")
    answer = {"role": "assistant", "content": _REPLY, **dict.fromkeys(names, _THOUGHT)}
    for message in (answer, {"role": "assistant", "content": _REPLY, "reasoning_content": _THOUGHT}):
        try:
            text = template([dict(_USER), message], [], prompt=False).rpartition(_SAID)[2]
        except Refusal:
            continue
        found = _BETWEEN.search(text)
        if found is not None:
            return Thinking(found[1], found[2]), True
    return next((each for each in _KNOWN if each.close in source), None), False


def unread(content: str | None, tools: Sequence[Mapping[str, Any]]) -> str | None:
    """Name the format that an answer without calls looks like a call of; None: it looks like none.

    Args:
        content: of an answer to a request with tools, of which no call was read.
        tools: of the request.
    """
    text = (content or "").strip()
    if not text:
        return None
    schemas = parameters_of(tools)
    for each in FORMATS:
        if not each.first_only and any(mark in text for mark in each.marks):
            return each.name
    for each in FORMATS:
        if each.first_only or each.name == "mistral":
            begun = text if each.first_only else f"[TOOL_CALLS]{text}"  # control tokens are left out of content
            try:
                calls, _ = each.read(begun, schemas)
            except (ValueError, KeyError, TypeError, IndexError, RecursionError):
                continue
            if any(call.name in schemas for call in calls):
                return each.name
    return None
