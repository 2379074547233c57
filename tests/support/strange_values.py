"""Values of every JSON type, some of them absurd, in place of each value of a JSON document."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

DEEP = "[" * 800 + "]" * 800

# As JSON texts: no number of Python's says 1e999.
VALUES = (
    "null", "true", "0", "-1", "1e999", "-1e999", "NaN", "1e308", "9" * 400, "-" + "9" * 25, '""', '"text"',
    '"\\ud800"', '"\\u0000"', '"\\u202e\\u001b[31m"', '"' + "x" * 100_000 + '"', "[]", "[[]]", '[1, "a", null]', DEEP,
    "{}", '{"": {}}', '{"a": 1}', '{"a": "b"}', '{"\\ud800": [1]}', "[" + "0," * 100_000 + "0]",
)  # fmt: skip


def places(value: Any, depth: int = 3, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Return where in a document something can be replaced."""
    yield at
    if depth and isinstance(value, (dict, list)):
        names = list(value) if isinstance(value, dict) else list(range(len(value)))
        for name in names[:80]:
            yield from places(value[name], depth - 1, (*at, name))


def replace_at(document: Any, place: tuple[Any, ...], text: str) -> str:
    """Return a document as JSON, with this JSON text at one place."""
    mark = "@@here@@"
    copy = json.loads(json.dumps(document))
    if not place:
        return text
    inner = copy
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = mark
    return json.dumps(copy).replace(f'"{mark}"', text)
