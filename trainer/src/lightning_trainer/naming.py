"""Names for agents whose program sends none: from rules over its requests, of which the first match counts.

A rule is ``[NAME=]WHERE[:REGEX]``. WHERE is ``system`` (the system prompt), ``model`` (the requested model) or
``header:FIELD``. The name is NAME; without NAME, the match of the expression's first group, or its whole match if it
has no group.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from lightning_spans.errors import ConfigError

_RULE: Final = re.compile(
    r"(?:(?P<name>[^=:]+)=)?(?P<where>system|model|header:(?P<field>[A-Za-z0-9_-]+))(?::(?P<pattern>.*))?", re.DOTALL
)
_LONGEST: Final = 200  # most characters of a name from a program's request


@dataclass(frozen=True, slots=True)
class NameRule:
    """One rule.

    Attributes:
        where: which part of a request it reads.
        field: the header's name, in lower case; empty for the others.
        pattern: must match somewhere in that part.
        name: the agent's name; None: the matched text.
    """

    where: Literal["system", "model", "header"]
    field: str
    pattern: re.Pattern[str]
    name: str | None

    def name_of(self, request: Mapping[str, Any], model: str, headers: Mapping[bytes, bytes]) -> str | None:
        """Return the name of a request's agent; None if the rule gives none."""
        found = self.pattern.search(self._text(request, model, headers))
        if found is None:
            return None
        told = self.name or (found.group(1) if self.pattern.groups else found.group())
        return (told or "").strip()[:_LONGEST] or None

    def _text(self, request: Mapping[str, Any], model: str, headers: Mapping[bytes, bytes]) -> str:
        if self.where == "model":
            return model
        if self.where == "header":
            return headers.get(self.field.encode(), b"").decode("latin-1")
        return "\n".join(_system(request))


def parse_rules(texts: Sequence[str]) -> tuple[NameRule, ...]:
    """Parse rules.

    Raises:
        ConfigError: one is invalid.
    """
    return tuple(_rule(text) for text in texts)


def agent_of(
    rules: Sequence[NameRule], request: Mapping[str, Any], model: str, headers: Mapping[bytes, bytes]
) -> str | None:
    """Return the name that the first matching rule gives to a request; None if no rule gives one.

    Args:
        rules: in their order.
        request: in the format of a chat completion.
        model: requested by the program.
        headers: of the request, with lower-case names.
    """
    return next((name for rule in rules if (name := rule.name_of(request, model, headers)) is not None), None)


def _rule(text: str) -> NameRule:
    found = _RULE.fullmatch(text)
    if found is None:
        raise ConfigError(
            f"name-by {text!r}: write it as [NAME=]WHERE[:REGEX], WHERE being system, model or header:FIELD, such as"
            " title=system:'title generator' or header:x-agent."
        )
    where, _, field = found["where"].partition(":")
    if found["pattern"] is None and (where == "system" or found["name"]):
        raise ConfigError(f"name-by {text!r}: say what is looked for, as in {text}:REGEX.")
    try:
        pattern = re.compile(found["pattern"] or r".+", re.DOTALL if found["pattern"] is None else 0)
    except re.error as error:
        raise ConfigError(f"name-by {text!r}: {found['pattern']!r} is not a regular expression: {error}.") from None
    return NameRule(where, field.lower(), pattern, found["name"])  # type: ignore[arg-type]  # one of the three


def _system(request: Mapping[str, Any]) -> list[str]:
    texts: list[str] = []
    messages = request.get("messages")
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, Mapping) and message.get("role") in ("system", "developer"):
            content = message.get("content")
            parts = content if isinstance(content, list) else [{"text": content}]
            told = [part.get("text") for part in parts if isinstance(part, Mapping)]
            texts += [text for text in told if isinstance(text, str)]
    return texts
