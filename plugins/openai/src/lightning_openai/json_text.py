"""JSON text of programs, in which integers may have any size: orjson refuses to write those beyond 64 bits, and rounds.

What is data already is written by `lightning_spans.schema.json.dumps`, which refuses none either.
"""

from __future__ import annotations

import json
from typing import Any, Final

import orjson

from lightning_spans.schema.json import loads

_DIGITS_AS_0: Final = bytes(ord("0") if chr(byte) in "0123456789" else byte for byte in range(256))
_LONG: Final = b"0" * 19  # shorter integers fit 64 bits


def read_json(text: str | bytes | bytearray) -> Any:
    """Read JSON, integers of any size as they are.

    Raises:
        ValueError: it is not JSON.
    """
    content = text.encode(errors="surrogatepass") if isinstance(text, str) else bytes(text)
    if _LONG in content.translate(_DIGITS_AS_0):  # a tenth of what reading takes; an expression takes thrice that
        return json.loads(content)
    return loads(content)


def read_object(text: str | bytes | bytearray | None) -> dict[str, Any] | None:
    """Read a JSON object; None where it is none."""
    try:
        found = read_json(text or b"")
    except (ValueError, TypeError):
        return None
    return found if isinstance(found, dict) else None


def to_json(value: object) -> str:
    """Return JSON text; what JSON does not know is given as its `str`, NaN and the infinities as null."""
    try:
        return orjson.dumps(value, default=_plain, option=orjson.OPT_NON_STR_KEYS).decode()
    except TypeError:  # an integer beyond 64 bits, or half of a surrogate pair
        return json.dumps(json.loads(json.dumps(value, default=_plain), parse_constant=lambda _: None))


def _plain(value: object) -> object:
    dump = getattr(value, "model_dump", None)  # pydantic
    return dump(mode="json", exclude_unset=True) if callable(dump) else str(value)
