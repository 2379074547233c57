"""Formats whose arguments are JSON: Hermes, Llama, Mistral, DeepSeek, Kimi, harmony."""

# ruff: noqa: RUF001 - DeepSeek's own letters

from __future__ import annotations

import re
from typing import Any, Final

from lightning_trainer.gateway.formats.calls import (
    Calls,
    Tools,
    WrittenCall,
    as_name,
    as_object,
    expect,
    json_at,
    skip_space,
)

# Each reader takes the text from the first mark on, and the tools. Any fault is a ValueError, KeyError or TypeError.


def _parse_named_call(value: Any, arguments: str = "arguments") -> WrittenCall:
    if not isinstance(value, dict):
        raise ValueError(f"{value!r} is not a call")
    if arguments not in value:
        raise ValueError(f"a call without {arguments}")
    call_id = value.get("id")
    return WrittenCall(
        as_name(value["name"]), as_object(value[arguments]), call_id if isinstance(call_id, str) else None
    )


def hermes(text: str, tools: Tools) -> Calls:  # noqa: ARG001 - the protocol's
    """Read ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``. The last call may lack its end."""
    calls, left, at = [], [], 0
    while (found := text.find("<tool_call>", at)) >= 0:
        left.append(text[at:found])
        value, at = json_at(text, found + len("<tool_call>"))
        at = expect(text, at, "</tool_call>", or_end=True)
        calls.append(_parse_named_call(value))
    return calls, "".join([*left, text[at:]])


def llama_json(text: str, tools: Tools) -> Calls:  # noqa: ARG001
    """Read ``{"name": ..., "parameters": {...}}``, several separated by ``;``. No other text is allowed."""
    at, calls = 0, []
    if text.lstrip().startswith("<|python_tag|>"):
        at = text.index("<|python_tag|>") + len("<|python_tag|>")
    while skip_space(text, at) < len(text):
        value, at = json_at(text, at)
        calls.append(_parse_named_call(value, "parameters" if "parameters" in value else "arguments"))
        at = expect(text, at, ";", "<|python_tag|>", "{", or_end=True)
        at -= at > 0 and text[at - 1] == "{"
    if not calls:
        raise ValueError("no call")
    return calls, ""


_MISTRAL_NAME: Final = re.compile(r"\s*+([\w.-]+)\s*+(?:\[CALL_ID\]\s*+([\w-]+)\s*+)?(?:\[ARGS\]\s*+)?(?=\{)")


def mistral(text: str, tools: Tools) -> Calls:  # noqa: ARG001
    """Read ``[TOOL_CALLS] [{"name": ..., "arguments": ...}]`` or, newer, ``[TOOL_CALLS]name[ARGS]{...}`` repeated."""
    calls, left, at = [], [], 0
    while (found := text.find("[TOOL_CALLS]", at)) >= 0:
        left.append(text[at:found])
        at = found + len("[TOOL_CALLS]")
        if text.startswith("[", skip_space(text, at)):
            values, at = json_at(text, at)
            calls += [_parse_named_call(value) for value in values]
        else:
            head = _MISTRAL_NAME.match(text, at)
            if head is None:
                raise ValueError("no name of a tool")
            value, at = json_at(text, head.end())
            calls.append(WrittenCall(head[1], as_object(value), head[2]))
    if not calls:
        raise ValueError("no call")
    return calls, "".join([*left, text[at:]])


_BEGIN, _SEP, _END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


def deepseek(text: str, tools: Tools) -> Calls:  # noqa: ARG001
    """Read V3's ``function<sep>name`` with a fenced block of JSON, or V3.1's ``name<sep>{...}``."""
    at = expect(text, 0, "<｜tool▁calls▁begin｜>")
    calls = []
    while text.startswith(_BEGIN, skip_space(text, at)):
        at = expect(text, at, _BEGIN)
        sep = text.index(_SEP, at)
        first, at = text[at:sep].strip(), sep + len(_SEP)
        if text.startswith("{", skip_space(text, at)):
            name, (value, at) = first, json_at(text, at)
        else:
            fence = text.index("```json", at)
            name = text[at:fence]
            value, at = json_at(text, fence + len("```json"))
            at = expect(text, at, "```")
        at = expect(text, at, _END)
        calls.append(WrittenCall(as_name(name), as_object(value)))
    if not calls:
        raise ValueError("no call")
    at = expect(text, at, "<｜tool▁calls▁end｜>", or_end=True)
    return calls, text[at:]


_KIMI_NAME: Final = re.compile(r"\s*(?:functions\.)?([\w.-]+):(\d+)\s*")


def kimi(text: str, tools: Tools) -> Calls:  # noqa: ARG001
    """Read Kimi K2's ``<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>``."""
    at, calls = expect(text, 0, "<|tool_calls_section_begin|>"), []
    while text.startswith("<|tool_call_begin|>", skip_space(text, at)):
        at = expect(text, at, "<|tool_call_begin|>")
        middle = text.index("<|tool_call_argument_begin|>", at)
        head = _KIMI_NAME.fullmatch(text, at, middle)
        if head is None:
            raise ValueError("no name of a tool")
        value, at = json_at(text, middle + len("<|tool_call_argument_begin|>"))
        at = expect(text, at, "<|tool_call_end|>")
        calls.append(WrittenCall(head[1], as_object(value), head[0].strip()))
    if not calls:
        raise ValueError("no call")
    at = expect(text, at, "<|tool_calls_section_end|>", or_end=True)
    return calls, text[at:]


_HARMONY: Final = re.compile(
    r"\s*+(?:<\|start\|>assistant\s*+)?(?:<\|channel\|>(?:commentary|analysis)\s*+)?to=functions\.([\w.-]+)\s*+"
    r"(?:<\|channel\|>(?:commentary|analysis)\s*+)?(?:<\|constrain\|>\s*+)?(?:json\s*+)?<\|message\|>"
)


def harmony(text: str, tools: Tools) -> Calls:  # noqa: ARG001
    """Read gpt-oss's messages to functions. The recipient may be before or after the channel; models write both."""
    at, calls = 0, []
    while skip_space(text, at) < len(text):
        head = _HARMONY.match(text, at)
        if head is None:
            break
        value, at = json_at(text, head.end())
        at = expect(text, at, "<|call|>", "<|end|>", or_end=True)
        calls.append(WrittenCall(head[1], as_object(value)))
    if not calls or " to=functions" in text[at:]:
        raise ValueError("no call")
    return calls, text[at:]
