"""Hydra's grammar: values as written on its command line."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any


def as_hydra(values: Mapping[str, Any]) -> list[str]:
    """Return options in the form that Hydra reads on a command line."""
    return [f"{key}={_literal(value)}" for key, value in values.items()]


def _literal(value: Any) -> str:
    """Return a value in the grammar of Hydra's overrides."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        # A backslash is literal unless it comes before a quote.
        return '"' + re.sub(r'(\\*)("|$)', lambda found: found[1] * 2 + ('\\"' if found[2] else ""), value) + '"'
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_literal(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(_literal(item) for item in value) + "]"
    return str(value)
