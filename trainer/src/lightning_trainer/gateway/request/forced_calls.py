"""A grammar, in llguidance's Lark, of an answer that must consist of tool calls in a model's own format.

Single tokens, such as control tokens, are written by number, so that letters that spell one do not match.
"""

from __future__ import annotations

import json
import keyword
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from lightning_trainer.gateway.formats.calls import kinds_of, parameters_of
from lightning_trainer.gateway.formats.frames import NINE_LETTERS, CallFrame, Pairs

_NAME: Final = re.compile(r"[\w.-]+")
_SCALARS: Final = frozenset({"integer", "number", "boolean", "null", "string"})
_OF_AN_OBJECT: Final = frozenset({
    "type", "properties", "required", "additionalProperties", "title", "description", "$schema", "$defs", "definitions",
})  # fmt: skip
_NOT_OF_A_TEXT: Final = ("pattern", "format", "not", "if", "contentEncoding")


def calls_lark(frame: CallFrame, tools: Sequence[Mapping[str, Any]], most: int) -> str:
    """Return the rule ``calls``, and those that it needs.

    Args:
        frame: how the model writes calls.
        tools: the tools that may be called.
        most: calls.

    Raises:
        ValueError: this format cannot express a name or a schema.
    """
    words = _Words(frame)
    names = " | ".join(f"call_{at}" for at in range(len(tools)))
    more = "" if frame.between is None or most == 1 else f" ({words.of(frame.between)} call){{0,{most - 1}}}"
    lines = [f"calls: {words.of(frame.begin)} call{more} {words.of(frame.end)}", f"call: {names}"]
    for at, tool in enumerate(tools):
        function = tool["function"]
        name, schema = function["name"], function.get("parameters") or {"type": "object"}
        in_json = frame.pairs is None and frame.begin.endswith('"')
        lines.append(f"call_{at}: {words.of(_quote_name(name, frame, in_json=in_json) + frame.middle)} args_{at}")
        if frame.pairs is None:
            lines.append(f"args_{at}: {json_lark(schema, *frame.separators)}")
        else:
            _check_object(name, schema)
            lines += _ArgumentsRule(f"args_{at}", tool, schema, frame.pairs, words).lines()
    return "\n".join(lines) + "\n"


def json_lark(schema: Mapping[str, Any], comma: str = ", ", colon: str = ": ") -> str:
    """Return the rule for JSON of a schema.

    It is written as Python writes it, or as a template does, which is what models have seen; with free white space, a
    small model could write nothing else.
    """
    how = {"whitespace_flexible": False, "item_separator": comma, "key_separator": colon}
    return "%json " + json.dumps({**schema, "x-guidance": how}, ensure_ascii=False)


def _quote_name(name: str, frame: CallFrame, *, in_json: bool = False) -> str:
    """Return a name as it is written.

    Raises:
        ValueError: it cannot be.
    """
    literal = frame.pairs is not None and frame.pairs.key_of_text is None
    fine = all(map(_is_identifier, name.split("."))) if literal else _NAME.fullmatch(name)
    if not fine and not in_json:
        raise ValueError(f"the name {name!r} can't be written in this format")
    return json.dumps(name, ensure_ascii=False)[1:-1]


def _is_identifier(name: str) -> bool:
    return name.isidentifier() and not keyword.iskeyword(name)


def _check_object(name: str, schema: Mapping[str, Any]) -> None:
    others = sorted(schema.keys() - _OF_AN_OBJECT)
    if others or schema.get("type", "object") != "object":
        raise ValueError(f"parameters of {name} are not a plain object ({', '.join(others) or schema['type']})")


class _Words:
    """Converts texts of a frame to their form in a grammar."""

    def __init__(self, frame: CallFrame) -> None:
        self.tokens = dict(frame.tokens or {})
        self.frame = frame
        listed = sorted((NINE_LETTERS, *self.tokens), key=len, reverse=True)
        self._apart = re.compile(f"({'|'.join(map(re.escape, listed))})")

    def of(self, text: str) -> str:
        """Return the form of a text: letters, tokens and ids of calls."""
        return " ".join(self._one(part) for part in self._apart.split(text) if part) or '""'

    def _one(self, part: str) -> str:
        if part == NINE_LETTERS:
            return "/[A-Za-z0-9]{9}/"
        return f"<[{self.tokens[part]}]>" if part in self.tokens else json.dumps(part, ensure_ascii=False)

    def letters(self, text: str) -> tuple[str, str]:
        """Split a text at its first single token."""
        place = min((at for mark in self.tokens if (at := text.find(mark)) >= 0), default=len(text))
        return text[:place], text[place:]


@dataclass(frozen=True, slots=True)
class _ArgumentsRule:
    """The arguments of one tool, written one by one in the order of its schema."""

    rule: str
    tool: Mapping[str, Any]
    schema: Mapping[str, Any]
    pairs: Pairs
    words: _Words

    def lines(self) -> Iterator[str]:
        """Return the rule. Each argument that is not required may be left out."""
        (name,) = known = parameters_of([self.tool])
        schemas, needed = known[name], set(self.schema.get("required") or ())
        if missing := needed - schemas.keys():
            raise ValueError(f"{name} requires {', '.join(sorted(missing))}, but describes none of them")
        count, words = len(schemas), self.words
        yield f"{self.rule}: {self.rule}_none_0"
        for at, (key, schema) in enumerate(schemas.items()):
            skipped = ("", "") if key in needed else (f" | {self.rule}_none_{at + 1}", f" | {self.rule}_some_{at + 1}")
            one = f"{self.rule}_{at} {self.rule}_some_{at + 1}"
            yield f"{self.rule}_none_{at}: {words.of(self.pairs.first)} {one}{skipped[0]}"
            yield f"{self.rule}_some_{at}: {words.of(self.pairs.joint)} {one}{skipped[1]}"
            yield from self._pair(f"{self.rule}_{at}", _quote_name(key, words.frame), schema)
        yield f"{self.rule}_none_{count}: {words.of(self.pairs.empty)}"
        yield f'{self.rule}_some_{count}: ""'

    def _pair(self, rule: str, key: str, schema: Any) -> Iterator[str]:
        pairs, words, kinds = self.pairs, self.words, kinds_of(schema)
        schema = schema if isinstance(schema, Mapping) else {}
        if pairs.key_of_text is not None and "string" in kinds:
            if kinds - {"string", "null"}:
                raise ValueError(f"the parameter {key} may be a string or another type")
            yield f"{rule}: {words.of(key + pairs.key_of_text)} {rule}_text"
            yield from self._text(f"{rule}_text", key, schema)
            return
        if not pairs.objects and not _is_flat(schema, kinds):
            raise ValueError(f"the parameter {key} may contain an object")
        inner = {name: self.schema[name] for name in ("$defs", "definitions") if name in self.schema}
        yield f"{rule}: {words.of(key + pairs.key)} {rule}_json {words.of(pairs.close)}"
        yield f"{rule}_json: {json_lark({**schema, **inner})}"

    def _text(self, rule: str, key: str, schema: Mapping[str, Any]) -> Iterator[str]:
        """Return the rule of a plain text and its end."""
        close, ends = self.pairs.close_of_text, self._ends()
        low, high, listed = _limits(key, schema)
        if listed is not None:
            if any(end in text for text in listed for end in ends) or any(text != text.strip("\n") for text in listed):
                raise ValueError(f"a value of the parameter {key} can't be written in this format")
            choices = " | ".join(json.dumps(text, ensure_ascii=False) for text in listed)
            yield f"{rule}: ({choices}) {self.words.of(close)}"
            return
        letters, marks = self.words.letters(close)
        most = "" if high is None else max(0, high - bool(low))
        body = rf"[^\n](?s:.{{{low - 1},{most}}})" if low else f"(?s:.{{0,{most}}})"
        forbidden = "|".join(re.escape(end).replace("/", r"\/") for end in sorted(ends))
        name = rule.upper()
        yield f"{name}_BODY: /{body}/ & ~/(?s:.*)({forbidden})(?s:.*)/"
        if not marks:
            yield f"{rule}[suffix={json.dumps(close, ensure_ascii=False)}]: {name}_BODY"
        elif letters:  # a lexeme takes all it can: its end must be part of it, up to the token
            yield f"{name}: {name}_BODY {json.dumps(letters, ensure_ascii=False)}"
            yield f"{rule}: {name} {self.words.of(marks)}"
        else:
            yield f"{rule}: {name}_BODY{'' if low else '?'} {self.words.of(marks)}"

    def _ends(self) -> frozenset[str]:
        """Return what no text may contain, even in letters, because the reader would take it for an end."""
        frame, close = self.words.frame, self.pairs.close_of_text.strip()
        around = f"{close}{self.pairs.joint}{frame.between or ''}{frame.end}"
        marks = [text for text in self.words.tokens if text in around]
        return frozenset({close, *re.findall(r"</[^<>\s]*>", around), *marks})


def _is_flat(schema: Mapping[str, Any], kinds: set[str]) -> bool:
    """Whether no value of a schema contains an object."""
    if isinstance(schema.get("enum"), list):
        return not any(isinstance(value, list | dict) for value in schema["enum"])
    items = schema.get("items")
    return bool(kinds) and (
        kinds <= _SCALARS
        or (kinds == {"array"} and isinstance(items, Mapping) and bool(kinds_of(items)) and kinds_of(items) <= _SCALARS)
    )


def _limits(key: str, schema: Mapping[str, Any]) -> tuple[int, int | None, list[str] | None]:
    """Return the smallest and largest length of a text, or its possible values.

    Raises:
        ValueError: the schema says more than that.
    """
    choices = [one for name in ("anyOf", "oneOf", "allOf") for one in schema.get(name) or ()]
    members = [schema, *(one for one in choices if isinstance(one, Mapping) and one.get("type") != "null")]
    said = [one for one in members if one.keys() & {"enum", "const", "minLength", "maxLength"}]
    if len(said) > 1 or len(members) > 2 or any(name in one for one in members for name in _NOT_OF_A_TEXT):
        raise ValueError(f"there are further rules for the text {key} than its length or its values")
    (limits,) = said or [{}]
    if "enum" in limits or "const" in limits:
        values = limits.get("enum", [limits.get("const")])
        return 0, None, ["null" if value is None else str(value) for value in values]
    return int(limits.get("minLength") or 0), limits.get("maxLength"), None
