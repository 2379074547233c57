"""The required form of an answer: JSON of a schema, or calls of tools."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from lightning_trainer.gateway.formats.frames import HERMES, CallFrame
from lightning_trainer.gateway.request.fields import wrong
from lightning_trainer.gateway.request.forced_calls import calls_lark, json_lark

_MOST_CALLS: Final = 8  # of an answer that must be calls; a small model may not find an end by itself
_MOST_SPACES: Final = 1  # in a row; xgrammar cannot write exactly as Python does

Form: TypeAlias = Literal["structural_tag", "grammar"]
FORMS: Final[tuple[Form, ...]] = ("structural_tag", "grammar")  # of vLLM's ``structured_outputs``


@dataclass(frozen=True, slots=True)
class Constraint:
    """JSON, calls, or a choice of both.

    Attributes:
        schema: of an answer that is JSON; None: no JSON.
        tools: of an answer that is calls; empty: no calls.
        one_call: such an answer has at most one call.
    """

    schema: Mapping[str, Any] | None
    tools: Sequence[Mapping[str, Any]]
    one_call: bool

    def lark(self, frame: CallFrame = HERMES) -> str:
        """Return it in llguidance's Lark, with calls in a model's own format.

        Raises:
            ValueError: the calls cannot be restricted to their schemas.
        """
        if not self.tools:
            return f"start: {json_lark(self.schema or {})}\n"
        calls = calls_lark(frame, self.tools, 1 if self.one_call else _MOST_CALLS)
        if self.schema is None:
            return f"start: calls\n{calls}"
        if frame.begin.startswith("{"):  # of two rules that begin alike, llguidance may follow only one
            raise ValueError("in this format, a call and JSON start with the same text")
        return f"start: json | calls\njson: {json_lark(self.schema)}\n{calls}"

    def tag(self) -> dict[str, Any]:
        """Return it as a structural tag of xgrammar, with calls in Hermes' format."""
        choices = [] if self.schema is None else [_json_tag(self.schema)]
        if self.tools:
            choices.append(_call_tags(self.tools, one_call=self.one_call))
        return {"type": "structural_tag", "format": _one_of(choices)}

    def structured_outputs(self, form: Form, frame: CallFrame = HERMES) -> dict[str, str]:
        """Return vLLM's parameter of that name, for its backend xgrammar (a structural tag) or guidance."""
        return {form: json.dumps(self.tag(), ensure_ascii=False) if form == "structural_tag" else self.lark(frame)}


def constraint_of(
    tool_choice: Any, tools: Sequence[Mapping[str, Any]], response_format: Any, *, one_call: bool
) -> Constraint | None:
    """Return the required form in a request; None if its answer is free.

    Args:
        tool_choice: as received.
        tools: those of the request.
        response_format: as received.
        one_call: an answer has at most one call.

    Raises:
        Refusal: one of them is malformed.
    """
    schema = _schema(response_format)
    chosen = _required_tools(tool_choice, tools)
    if chosen:
        return Constraint(None, chosen, one_call)
    if schema is None:
        return None
    return Constraint(schema, () if tool_choice == "none" else tools, one_call)


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


def _required_tools(choice: Any, tools: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Return the tools of which one must be called; empty if the model is free."""
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
        raise wrong("tool_choice", choice, "of tools in the request")
    return found


def _parts(tool: Mapping[str, Any]) -> tuple[str, Mapping[str, Any], str]:
    """Return the text before the arguments of a call, their schema, and the text after them."""
    function = tool["function"]
    begin = '<tool_call>\n{"name": ' + json.dumps(function["name"], ensure_ascii=False) + ', "arguments": '
    return begin, function.get("parameters") or {"type": "object"}, "}\n</tool_call>"


def _call_tags(tools: Sequence[Mapping[str, Any]], *, one_call: bool) -> dict[str, Any]:
    tags = []
    for tool in tools:
        begin, schema, end = _parts(tool)
        tags.append({"type": "tag", "begin": begin, "content": _json_tag(schema), "end": end})
    call = _one_of(tags)
    if one_call:
        return call
    another = {"type": "sequence", "elements": [{"type": "const_string", "value": "\n"}, call]}
    others = {"type": "repeat", "min": 0, "max": _MOST_CALLS - 1, "content": another}
    return {"type": "sequence", "elements": [call, others]}


def _json_tag(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": _MOST_SPACES}


def _one_of(choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return choices[0] if len(choices) == 1 else {"type": "or", "elements": list(choices)}
