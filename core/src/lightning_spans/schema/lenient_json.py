"""The one parser of JSON that others wrote: requests, replies, data files, arguments of tools.

docs/reference/json.md lists how each oddity is read. Our own records are read by `schema.json.loads`.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

import orjson

_DIGITS_AS_0: Final = bytes(ord("0") if chr(byte) in "0123456789" else byte for byte in range(256))
_LONG: Final = b"0" * 19  # shorter integers fit 64 bits
_WHOLE: Final = re.compile(rb"(?<![\d.])\d{19}")  # not after a point: those digits belong to a log-probability
_HALF: Final = re.compile("[\ud800-\udfff]")
_MARK: Final = b"\xef\xbb\xbf"  # of the byte order


def read_json(text: str | bytes | bytearray) -> Any:
    """Parse JSON as leniently as Python's own parser, with fewer surprises.

    Integers of any size are exact. NaN, the infinities and numbers beyond a float's range become floats that are not
    finite; `lightning_spans.schema.json.dumps` writes them as null. Half of a surrogate pair becomes U+FFFD, because no
    tokenizer and no UTF-8 text can hold it. A byte order mark is skipped. Of equal keys the last counts.

    Raises:
        ValueError: it is not JSON, not UTF-8, or nested too deeply.
    """
    content = text.encode(errors="surrogatepass") if isinstance(text, str) else bytes(text)
    # The first check takes a tenth of the parsing time, a regular expression three times that: so it comes second.
    if not (_LONG in content.translate(_DIGITS_AS_0) and _WHOLE.search(content)):
        try:
            return orjson.loads(content)
        except orjson.JSONDecodeError:
            pass
    try:
        written = content.removeprefix(_MARK).decode("utf-8", "surrogatepass")
        return _without_halves(json.loads(written, parse_int=_whole))
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def read_object(text: str | bytes | bytearray | None) -> dict[str, Any] | None:
    """Parse a JSON object; None if it is not one."""
    try:
        found = read_json(text or b"")
    except (ValueError, TypeError):
        return None
    return found if isinstance(found, dict) else None


def _whole(digits: str) -> int | float:
    try:
        return int(digits)
    except ValueError:  # Python reads at most 4300 digits
        return float(digits)


def _without_halves(value: Any) -> Any:
    if isinstance(value, str):
        return _HALF.sub("\ufffd", value)
    if isinstance(value, list):
        return [_without_halves(item) for item in value]
    if isinstance(value, dict):
        return {_without_halves(key): _without_halves(item) for key, item in value.items()}
    return value
