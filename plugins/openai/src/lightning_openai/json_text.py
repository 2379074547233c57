"""JSON text for any object of a program: nothing is rejected.

`lightning_spans.schema.json` parses what others wrote; `schema.json.dumps` writes plain data.
"""

from __future__ import annotations

import json

import orjson


def to_json(value: object) -> str:
    """Return JSON text. Objects unknown to JSON become their `str`, NaN and infinities become null."""
    try:
        return orjson.dumps(value, default=_plain, option=orjson.OPT_NON_STR_KEYS).decode()
    except TypeError:  # an integer beyond 64 bits, or half of a surrogate pair
        return json.dumps(json.loads(json.dumps(value, default=_plain), parse_constant=lambda _: None))


def _plain(value: object) -> object:
    dump = getattr(value, "model_dump", None)  # pydantic
    return dump(mode="json", exclude_unset=True) if callable(dump) else str(value)
