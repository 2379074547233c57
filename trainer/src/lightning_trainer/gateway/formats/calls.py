"""A tool call as a model wrote it, and what the readers of all formats share: JSON, and values typed by a schema."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

Tools: TypeAlias = Mapping[str, Mapping[str, Any]]  # the schema of each parameter, by tool and parameter


@dataclass(frozen=True, slots=True)
class WrittenCall:
    """A parsed call.

    Attributes:
        name: of the tool.
        arguments: an object.
        call_id: the id that the model wrote; None if its format has none.
    """

    name: str
    arguments: Mapping[str, Any]
    call_id: str | None = None


Calls: TypeAlias = tuple[list[WrittenCall], str]  # and the text outside all of them


def parameters_of(tools: Sequence[Mapping[str, Any]]) -> Tools:
    """Return the schemas of all parameters of a request's tools."""
    found: dict[str, Mapping[str, Any]] = {}
    for tool in tools:
        function = tool.get("function") or {}
        whole = function.get("parameters") or {}
        properties = whole.get("properties")
        shown = properties if isinstance(properties, Mapping) else {}
        found[str(function.get("name"))] = {name: _resolve_references(schema, whole) for name, schema in shown.items()}
    return found


_DEEPEST: Final = 8  # references to references
_CHOICES: Final = ("anyOf", "oneOf", "allOf")


def _resolve_references(schema: Any, whole: Mapping[str, Any], depth: int = 0) -> Any:
    """Return a schema with its references replaced by their targets, as far as needed to know a value's type."""
    if not isinstance(schema, Mapping) or depth > _DEEPEST:
        return schema
    if isinstance(reference := schema.get("$ref"), str):
        return _resolve_references(_follow_pointer(reference, whole), whole, depth + 1)
    listed = {name: schema[name] for name in _CHOICES if isinstance(schema.get(name), list)}
    return {
        **schema,
        **{name: [_resolve_references(one, whole, depth + 1) for one in given] for name, given in listed.items()},
    }


def _follow_pointer(reference: str, whole: Mapping[str, Any]) -> Any:
    """Return the target of a reference within the schema; empty if there is none."""
    found: Any = whole if reference.startswith("#/") else None
    for part in reference[2:].split("/"):
        found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return {} if found is None else found


def _finite(text: str) -> float:
    number = float(text)
    if math.isfinite(number):
        return number
    raise ValueError(f"{text} is not JSON")  # Python would write it back unchanged, and no client could parse it


_DECODER: Final = json.JSONDecoder(parse_constant=_finite, parse_float=_finite)
_SPACE: Final = re.compile(r"\s*")


def skip_space(text: str, at: int) -> int:
    """Return the position of the next character that is not white space."""
    found = _SPACE.match(text, at)
    return found.end() if found else at


def json_at(text: str, at: int) -> tuple[Any, int]:
    """Parse the JSON value that begins at a position, after white space; return it and the position after it.

    Raises:
        ValueError: none begins there.
    """
    return _DECODER.raw_decode(text, skip_space(text, at))


def expect(text: str, at: int, *wanted: str, or_end: bool = False) -> int:
    """Return the position after one of these texts, which may follow white space.

    Args:
        text: the text to read.
        at: the position.
        wanted: the texts.
        or_end: also accept the end of the text.

    Raises:
        ValueError: something else is there.
    """
    place = skip_space(text, at)
    for one in wanted:
        if text.startswith(one, place):
            return place + len(one)
    if or_end and place == len(text):
        return place
    raise ValueError(f"{text[place : place + 20]!r}, not {wanted}")


def parse_json(text: str) -> Any:
    """Parse a JSON text.

    Raises:
        ValueError: it is not JSON.
    """
    value, end = json_at(text, 0)
    if text[end:].strip():
        raise ValueError("there is text after the JSON")
    return value


def as_object(value: Any) -> Mapping[str, Any]:
    """Return arguments as an object: from an object, an object as JSON text, or nothing.

    Raises:
        ValueError: they are something else.
    """
    if isinstance(value, str) and value.strip().startswith("{"):
        value = parse_json(value)
    if value is None or value == "":
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"arguments {value!r} are no object")
    return value


def as_name(value: Any) -> str:
    """Return a tool's name.

    Raises:
        ValueError: it is not text, or empty.
    """
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"name {value!r}")
    return value.strip()


def convert_type(raw: str, schema: Any) -> Any:
    """Convert a value written as plain text to the type in the tool's schema; keep it as text if no type fits."""
    kinds = kinds_of(schema)
    if kinds == {"string"}:
        return raw
    text = raw.strip()
    if text in _values_of(schema):
        return text
    if "null" in kinds and text.lower() in {"null", "none"}:
        return None
    if "boolean" in kinds and text.lower() in {"true", "false"}:  # templates in Python write True
        return text.lower() == "true"
    try:
        value = parse_json(text)
    except ValueError:
        return raw
    return value if not kinds or _kind(value) & kinds else raw


_OF_PYTHON: Final[tuple[tuple[type, frozenset[str]], ...]] = (
    (bool, frozenset({"boolean"})),
    (int, frozenset({"integer", "number"})),
    (float, frozenset({"number"})),
    (str, frozenset()),  # a quoted text where text is allowed: the quotes belong to it
    (list, frozenset({"array"})),
    (dict, frozenset({"object"})),
)


def _kind(value: Any) -> frozenset[str]:
    return next((kinds for kind, kinds in _OF_PYTHON if isinstance(value, kind)), frozenset({"null"}))


def _values_of(schema: Any) -> list[Any]:
    """Return the values that a schema, or one of its choices, lists."""
    if not isinstance(schema, Mapping):
        return []
    choices = [one for name in _CHOICES if isinstance(schema.get(name), list) for one in schema[name]]
    return [*(_own_values(schema) or ()), *(value for one in choices for value in _values_of(one))]


def _own_values(schema: Mapping[str, Any]) -> list[Any] | None:
    """Return the values that a schema itself lists; None if it lists none."""
    if isinstance(schema.get("enum"), list):
        return list(schema["enum"])
    return [schema["const"]] if "const" in schema else None


def kinds_of(schema: Any) -> set[str]:
    """Return the JSON types that a schema allows; empty if it does not say."""
    if not isinstance(schema, Mapping):
        return set()
    named = schema.get("type")
    if isinstance(named, str):
        return {named.lower()}
    if isinstance(named, list):
        return {str(name).lower() for name in named}
    if (values := _own_values(schema)) is not None:
        return {"string"} if all(isinstance(value, str) for value in values) else set()
    if isinstance(schema.get("allOf"), list):
        return next((kinds for inner in schema["allOf"] if (kinds := kinds_of(inner))), set())
    return _kinds_of_choices([*(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())])


def _kinds_of_choices(choices: Sequence[Any]) -> set[str]:
    every = [kinds_of(one) for one in choices]
    return set().union(*every) if all(every) else set()
