"""Formats that write a call as code: Llama's and LFM's Python, Gemma's own notation."""

from __future__ import annotations

import ast
import re
from typing import Any, Final

from lightning_trainer.gateway.formats.calls import Calls, Tools, WrittenCall, as_name, json_at, skip_space

_MOST_PARTS: Final = 20_000  # a call that writes a long file has a few thousand; each part takes time to read


def pythonic(text: str, tools: Tools) -> Calls:  # noqa: ARG001 - the protocol's
    """Read ``[f(a=1), g(b="x")]``: a list of calls with literals. No other text is allowed."""
    body = text.strip().removeprefix("<|python_start|>").removesuffix("<|python_end|>").strip()
    return _of_python(body), ""


def lfm(text: str, tools: Tools) -> Calls:  # noqa: ARG001
    """Read LFM2's ``<|tool_call_start|>[f(a=1)]<|tool_call_end|>``."""
    body = text.removeprefix("<|tool_call_start|>")
    inner, end, left = body.partition("<|tool_call_end|>")
    if "<|tool_call_start|>" in left:
        raise ValueError("a second list of calls")
    return _of_python(inner.strip()), left if end else ""


def _of_python(body: str) -> list[WrittenCall]:
    if len(body) > 1_000_000 or sum(map(body.count, ",:([{")) > _MOST_PARTS:
        raise ValueError("the list of calls is too long")
    try:
        tree = ast.parse(body, mode="eval").body
    except (SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError("no Python") from error
    listed = tree.elts if isinstance(tree, ast.List) else [tree] if isinstance(tree, ast.Call) else []
    calls = [_call(node) for node in listed]
    if not calls:
        raise ValueError("no call")
    return calls


def _call(node: ast.expr) -> WrittenCall:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("no call with named arguments")
    arguments = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("arguments without a name")
        arguments[keyword.arg] = _literal(keyword.value)
    return WrittenCall(as_name(ast.unparse(node.func)), arguments)


_CONSTANTS: Final = {"true": True, "false": False, "null": None}


def _literal(node: ast.expr) -> Any:
    """Return a literal's value. JSON's names for true, false and null are accepted too, because models mix them in."""
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        keys = [_literal(key) for key in node.keys if key is not None]
        if len(keys) != len(node.values) or not all(isinstance(key, str) for key in keys):
            raise ValueError("an object whose keys are not strings")
        return {key: _literal(value) for key, value in zip(keys, node.values, strict=True)}
    value = ast.literal_eval(node)
    if not isinstance(value, str | int | float | bool | None):
        raise TypeError(f"{value!r} is not JSON")
    return value


_GEMMA: Final = (
    ("<|tool_call>", "<tool_call|>", '<|"|>'),
    ("<start_function_call>", "<end_function_call>", "<escape>"),
)
_GEMMA_NAME: Final = re.compile(r"\s*call:([\w.-]+)\s*(?=\{)")
_GEMMA_KEY: Final = re.compile(r"\s*([\w.$-]+)\s*:")


def gemma(text: str, tools: Tools) -> Calls:  # noqa: ARG001
    """Read Gemma 4's ``<|tool_call>call:NAME{key:<|"|>text<|"|>,n:1}<tool_call|>``, or FunctionGemma's tags."""
    begin, end, quote = next(tags for tags in _GEMMA if text.lstrip().startswith(tags[0]))
    calls, left, at = [], [], 0
    while (found := text.find(begin, at)) >= 0:
        left.append(text[at:found])
        head = _GEMMA_NAME.match(text, found + len(begin))
        if head is None:
            raise ValueError("no name of a tool")
        value, at = _gemma_value(text, head.end(), quote)
        place = skip_space(text, at)
        if not text.startswith(end, place) and place != len(text):
            raise ValueError("an incomplete call")
        at = place + len(end)
        calls.append(WrittenCall(head[1], value))
    if not calls:
        raise ValueError("no call")
    return calls, "".join([*left, text[at:]])


def _gemma_value(text: str, at: int, quote: str) -> tuple[Any, int]:
    at = skip_space(text, at)
    if text.startswith(quote, at):
        end = text.index(quote, at + len(quote))
        return text[at + len(quote) : end], end + len(quote)
    if text.startswith("{", at):
        return _gemma_many(text, at + 1, quote, "}")
    if text.startswith("[", at):
        return _gemma_many(text, at + 1, quote, "]")
    for name, value in {**_CONSTANTS, "None": None}.items():
        if text.startswith(name, at):
            return value, at + len(name)
    return json_at(text, at)


def _gemma_many(text: str, at: int, quote: str, close: str) -> tuple[Any, int]:
    """Read the content of braces or brackets."""
    pairs: dict[str, Any] = {}
    items: list[Any] = []
    while not text.startswith(close, at := skip_space(text, at)):
        if close == "}":
            name, at = _gemma_key(text, at, quote)
            pairs[name], at = _gemma_value(text, at, quote)
        else:
            item, at = _gemma_value(text, at, quote)
            items.append(item)
        at = skip_space(text, at)
        if text.startswith(",", at):
            at += 1
        elif not text.startswith(close, at):
            raise ValueError("no comma between two values")
    return (pairs if close == "}" else items), at + 1


def _gemma_key(text: str, at: int, quote: str) -> tuple[str, int]:
    if text.startswith(quote, at):
        end = text.index(quote, at + len(quote))
        after = skip_space(text, end + len(quote))
        if not text.startswith(":", after):
            raise ValueError("a key without a value")
        return text[at + len(quote) : end], after + 1
    found = _GEMMA_KEY.match(text, at)
    if found is None:
        raise ValueError("no key")
    return found[1], found.end()
