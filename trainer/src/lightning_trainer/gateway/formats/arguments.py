"""Arguments of a tool call: JSON text, as data."""

from __future__ import annotations

import json
import re
from typing import Any, Final

import orjson

from lightning_spans.schema.json import dumps

_BIG: Final = re.compile(r"\d{19}")  # perhaps an integer beyond 64 bits, which orjson would round


def as_data(arguments: Any) -> Any:
    """Read arguments given as JSON text, every integer exact. What is no JSON, or no text, stays as it is."""
    if not isinstance(arguments, str):
        return arguments
    try:
        read = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return arguments
    return json.loads(arguments) if _BIG.search(arguments) else read


def as_text(arguments: Any) -> str:
    """Write arguments as JSON text; text stays as it is."""
    return arguments if isinstance(arguments, str) else dumps(arguments).decode().lstrip()
