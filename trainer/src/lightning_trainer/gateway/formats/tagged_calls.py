"""Formats whose arguments are tags with plain text, typed by the tool's schema: Qwen3-Coder, GLM, MiniMax, DSML."""

# ruff: noqa: RUF001 - DeepSeek's own letters

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from lightning_trainer.gateway.formats.calls import (
    Calls,
    Tools,
    WrittenCall,
    as_name,
    convert_type,
    parse_json,
    skip_space,
)

# An expression with `.*?` is tried at one position at a time: where its end is missing, a search would start again at
# each of its beginnings, and read the rest of the answer each time.


def _blocks(text: str, call: re.Pattern[str], mark: str, read: Callable[[re.Match[str]], WrittenCall]) -> Calls:
    calls, left, at = [], [], 0
    while (found := text.find(mark, at)) >= 0:
        match = call.match(text, found)
        if match is None:
            raise ValueError("an incomplete call")
        left.append(text[at:found])
        calls.append(read(match))
        at = match.end()
    if not calls:
        raise ValueError("no call")
    return calls, "".join([*left, text[at:]])


def _one_after_another(text: str, part: re.Pattern[str], parts: str) -> Iterator[re.Match[str]]:
    """Return the parts of a text that consists only of them and white space in between."""
    at = skip_space(text, 0)
    while at < len(text):
        match = part.match(text, at)
        if match is None:
            raise ValueError(f"there is text between the {parts}")
        yield match
        at = skip_space(text, match.end())


def _arguments(body: str, pair: re.Pattern[str], value: Callable[[str, re.Match[str]], Any]) -> dict[str, Any]:
    found = list(_one_after_another(body, pair, "parameters"))
    names = [match[1].strip() for match in found]
    if len(set(names)) != len(names):
        raise ValueError("a parameter twice")
    return {name: value(name, match) for name, match in zip(names, found, strict=True)}


_QWEN: Final = re.compile(r"<tool_call>\s*<function=([^>\n]+)>(.*?)</function>\s*(?:</tool_call>|\Z)", re.DOTALL)
_QWEN_PAIR: Final = re.compile(
    r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>(?=\s*(?:<parameter=|\Z))", re.DOTALL
)  # a value may contain the tag's text


def qwen_xml(text: str, tools: Tools) -> Calls:
    """Read ``<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>``."""

    def one(match: re.Match[str]) -> WrittenCall:
        schemas = tools.get(match[1].strip(), {})
        return WrittenCall(
            as_name(match[1]),
            _arguments(match[2], _QWEN_PAIR, lambda name, pair: convert_type(pair[2], schemas.get(name))),
        )

    return _blocks(text, _QWEN, "<tool_call>", one)


_GLM: Final = re.compile(r"<tool_call>\s*([^\s<]+)\s*((?:<arg_key>.*?)?)</tool_call>", re.DOTALL)
_GLM_PAIR: Final = re.compile(
    r"(?><arg_key>(.*?)</arg_key>\s*<arg_value>)(.*?)</arg_value>(?=\s*(?:<arg_key>|\Z))", re.DOTALL
)  # the key ends at the first possible position


def glm(text: str, tools: Tools) -> Calls:
    """Read ``<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>``."""

    def one(match: re.Match[str]) -> WrittenCall:
        schemas = tools.get(match[1], {})
        return WrittenCall(
            match[1], _arguments(match[2], _GLM_PAIR, lambda name, pair: convert_type(pair[2], schemas.get(name)))
        )

    return _blocks(text, _GLM, "<tool_call>", one)


_MINIMAX: Final = re.compile(r"<minimax:tool_call>(.*?)(?:</minimax:tool_call>|\Z)", re.DOTALL)
_INVOKE: Final = re.compile(r"<invoke name=\"?([^\">]+)\"?>(.*?)</invoke>", re.DOTALL)
_MINIMAX_PAIR: Final = re.compile(
    r"<parameter name=\"?([^\">]+)\"?>(.*?)</parameter>(?=\s*(?:<parameter|\Z))", re.DOTALL
)


_DSML: Final = re.compile(
    r"<｜DSML｜(?:function|tool)_calls>(.*?)(?:</｜DSML｜(?:function|tool)_calls>|\Z)",
    re.DOTALL,
)
_DSML_INVOKE: Final = re.compile(r"<｜DSML｜invoke name=\"([^\"]+)\">(.*?)</｜DSML｜invoke>", re.DOTALL)
_DSML_PAIR: Final = re.compile(
    r"<｜DSML｜parameter name=\"([^\"]+)\" string=\"(true|false)\">(.*?)</｜DSML｜parameter>",
    re.DOTALL,
)


def _stated_value(pair: re.Match[str], schema: Any) -> Any:  # noqa: ARG001 - it is said what the value is
    return pair[3] if pair[2] == "true" else parse_json(pair[3])


def _typed_value(pair: re.Match[str], schema: Any) -> Any:
    raw = pair[2]
    in_lines = len(raw) > 1 and raw.startswith("\n") and raw.endswith("\n")  # otherwise line breaks belong to the value
    return convert_type(raw[1:-1] if in_lines else raw, schema)


@dataclass(frozen=True, slots=True)
class _Tags:
    mark: str
    block: re.Pattern[str]
    invoke: re.Pattern[str]
    pair: re.Pattern[str]
    value: Callable[[re.Match[str], Any], Any]


_OF_MINIMAX: Final = _Tags("<minimax:tool_call>", _MINIMAX, _INVOKE, _MINIMAX_PAIR, _typed_value)
_OF_DSML: Final = _Tags("<｜DSML｜", _DSML, _DSML_INVOKE, _DSML_PAIR, _stated_value)


def minimax(text: str, tools: Tools) -> Calls:
    """Read MiniMax M2's ``<minimax:tool_call><invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke>``."""
    return _read_blocks(text, _OF_MINIMAX, tools)


def dsml(text: str, tools: Tools) -> Calls:
    """Read DeepSeek V3.2's tags, which state for each value whether it is text or JSON."""
    return _read_blocks(text, _OF_DSML, tools)


def _read_blocks(text: str, tags: _Tags, tools: Tools) -> Calls:
    """Read blocks of several calls each."""
    left = tags.block.sub("", text)
    calls: list[WrittenCall] = []
    for block in tags.block.finditer(text):
        for each in _one_after_another(block[1], tags.invoke, "calls"):
            schemas = tools.get(each[1].strip(), {})

            def value(name: str, pair: re.Match[str], known: Mapping[str, Any] = schemas) -> Any:
                return tags.value(pair, known.get(name))

            calls.append(WrittenCall(as_name(each[1]), _arguments(each[2], tags.pair, value)))
    if not calls or tags.mark in left:
        raise ValueError("an incomplete call")
    return calls, left
