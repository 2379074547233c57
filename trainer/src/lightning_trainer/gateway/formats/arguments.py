"""Arguments of a tool call, as JSON text or as data."""

from __future__ import annotations

from typing import Any

from lightning_spans.schema.json import dumps, read_json


def as_data(arguments: Any) -> Any:
    """Parse arguments given as JSON text. Anything that is not JSON text stays as it is."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return read_json(arguments)
    except ValueError:
        return arguments


def as_text(arguments: Any) -> str:
    """Write arguments as JSON text; text stays as it is."""
    return arguments if isinstance(arguments, str) else dumps(arguments).decode().lstrip()
