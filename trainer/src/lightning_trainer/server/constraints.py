"""What an answer must be, in llguidance's Lark: JSON of a schema, or calls of tools in the Hermes format."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from lightning_trainer.server.fields import wrong

_MOST_CALLS: Final = 8  # of an answer that must be calls; a small model may not find an end by itself
# As Python writes JSON, which is what models have seen; free white space would let a small model write nothing else.
_WRITTEN: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def grammar_of(
    tool_choice: Any, tools: Sequence[Mapping[str, Any]], response_format: Any, *, one_call: bool
) -> str | None:
    """Give the grammar that a request asks for; None when its answer is free.

    Args:
        tool_choice: as received.
        tools: those of the request.
        response_format: as received.
        one_call: an answer has one call at most.

    Raises:
        Refusal: one of them is malformed.
    """
    schema = _schema(response_format)
    chosen = _chosen(tool_choice, tools)
    if chosen:
        return "start: calls\n" + _calls(chosen, one_call=one_call)
    if schema is None:
        return None
    if tools and tool_choice != "none":
        return f"start: json | calls\njson: {_json(schema)}\n" + _calls(tools, one_call=one_call)
    return f"start: {_json(schema)}\n"


def _schema(wanted: Any) -> Mapping[str, Any] | None:
    kind = wanted.get("type") if isinstance(wanted, dict) else wanted
    if kind is None or kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    described = wanted.get("json_schema") if isinstance(wanted, dict) and kind == "json_schema" else None
    schema = described.get("schema") if isinstance(described, dict) else None
    if not isinstance(schema, dict):
        raise wrong("response_format", wanted, 'text, json_object, or json_schema with {"name": ..., "schema": {...}}')
    return schema


def _chosen(choice: Any, tools: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Give the tools of which one must be called; none where the model is free."""
    if choice in {"auto", "none"} if isinstance(choice, str) else choice is None:
        return ()
    if choice == "required":
        found = list(tools)
    else:
        function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
        if not isinstance(function, dict):
            expected = 'auto, none, required or {"type": "function", "function": {"name": ...}}'
            raise wrong("tool_choice", choice, expected)
        found = [tool for tool in tools if tool["function"]["name"] == function.get("name")]
    if not found:
        raise wrong("tool_choice", choice, "of tools that the request brings")
    return found


def _calls(tools: Sequence[Mapping[str, Any]], *, one_call: bool) -> str:
    names = " | ".join(f"call_{at}" for at in range(len(tools)))
    more = "" if one_call else f' ("\\n" call){{0,{_MOST_CALLS - 1}}}'
    lines = [f"calls: call{more}", f"call: {names}"]
    for at, tool in enumerate(tools):
        function = tool["function"]
        begin = '<tool_call>\n{"name": ' + json.dumps(function["name"], ensure_ascii=False) + ', "arguments": '
        schema = function.get("parameters") or {"type": "object"}
        lines.append(f'call_{at}: {json.dumps(begin)} args_{at} "}}\\n</tool_call>"')
        lines.append(f"args_{at}: {_json(schema)}")
    return "\n".join(lines) + "\n"


def _json(schema: Mapping[str, Any]) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": _WRITTEN}, ensure_ascii=False)
