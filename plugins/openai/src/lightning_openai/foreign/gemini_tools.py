"""Tools in Google's format: declarations with OpenAPI schemas, and the choice of a tool."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Final

from lightning_openai.foreign.dialect import Fields
from lightning_spans.schema.spans import Json

_CHOICES: Final = {"AUTO": "auto", "ANY": "required", "NONE": "none"}
_COUNTS: Final = frozenset({  # int64, which protocol buffers write as text in JSON
    "minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties",
})  # fmt: skip
_NAMED: Final = frozenset({"properties", "defs", "$defs"})  # schemas by name


@functools.lru_cache(1024)
def camel(name: str) -> str:
    """Return the usual spelling of a field's name, which may be written with underscores."""
    if "_" not in name:
        return name
    first, *rest = name.split("_")
    return first + "".join([word[:1].upper() + word[1:] for word in rest])


def read_tools(given: Any, untranslated: dict[str, Json]) -> dict[str, Json]:
    """Return the offered functions as in a chat completion. Google's own tools stay untranslated."""
    tools: list[Json] = []
    for place, item in enumerate(given if isinstance(given, list) else [given]):
        tool = Fields(item, f"tools[{place}]" if isinstance(given, list) else "tools", camel)
        declared = tool.take("functionDeclarations")
        for at, one in enumerate(declared if isinstance(declared, list) else [declared] if declared else ()):
            fields = Fields(one, f"tools[{place}].functionDeclarations[{at}]", camel)
            tools.append({"type": "function", "function": _function(fields)})
            untranslated |= fields.rest()
        untranslated |= tool.rest()
    return {"tools": tools} if tools else {}


def _function(declared: Fields) -> dict[str, Json]:
    function = declared.renamed({"name": "name", "description": "description"})
    schema, plain = declared.take("parametersJsonSchema"), declared.take("parameters")
    # A function's declared result type is not needed: its result is in the conversation.
    declared.take("response")
    declared.take("responseJsonSchema")
    function["parameters"] = schema or (json_schema(plain) if plain else {"type": "object", "properties": {}})
    return function


def read_tool_config(given: Any, untranslated: dict[str, Json], tools: Sequence[Json]) -> dict[str, Json]:
    """Return the choice of a tool as in a chat completion."""
    config = Fields(given, "toolConfig", camel)
    calling = Fields(config.take("functionCallingConfig"), "toolConfig.functionCallingConfig", camel)
    mode, allowed = calling.take("mode"), calling.take("allowedFunctionNames")
    chat: dict[str, Json] = {}
    if mode in _CHOICES:
        chat["tool_choice"] = _CHOICES[mode]
    elif mode not in (None, "", "MODE_UNSPECIFIED"):
        untranslated["toolConfig.functionCallingConfig.mode"] = mode
    if allowed and {*allowed} != {tool["function"].get("name") for tool in tools}:
        if len(allowed) == 1 and mode == "ANY":
            chat["tool_choice"] = {"type": "function", "function": {"name": allowed[0]}}
        else:
            untranslated["toolConfig.functionCallingConfig.allowedFunctionNames"] = allowed
    untranslated |= calling.rest() | config.rest()
    return chat


def json_schema(given: Any) -> Any:
    """Return an OpenAPI schema, with types such as ``STRING``, as a JSON schema."""
    if isinstance(given, list):
        return [json_schema(item) for item in given]
    if not isinstance(given, Mapping):
        return given
    schema: dict[str, Json] = {}
    for written, value in given.items():
        name = written if written.startswith("$") else camel(written)
        if name in _NAMED and isinstance(value, Mapping):
            schema[name] = {key: json_schema(item) for key, item in value.items()}
        elif name in {"items", "anyOf", "additionalProperties"}:
            schema[name] = json_schema(value)
        elif name == "type" and isinstance(value, str):
            schema[name] = value.lower()
        elif name in _COUNTS and isinstance(value, str):
            schema[name] = int(value)
        elif name not in {"nullable", "propertyOrdering"}:
            schema[name] = value
    if given.get("nullable") and isinstance(schema.get("type"), str):
        schema["type"] = [schema["type"], "null"]
    return schema
