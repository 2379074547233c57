"""Writes server-sent events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from lightning_spans.schema.json import dumps

DONE: Final = b"data: [DONE]\n\n"


def event(data: Any) -> bytes:
    """Return a JSON event's bytes."""
    return b"data: " + dumps(data) + b"\n\n"


def named_event(name: str, data: Mapping[str, Any]) -> bytes:
    """Return an event with its type, for surfaces with several types."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), dumps({"type": name, **data}))
