"""The JSON form of every record, both ways, from the fields of its dataclass: used by spools, columns and HTTP.

A record's fields and their types are declared once, in its class; docs/decisions/records.md explains the codec.
JSON that others wrote (requests, replies, data files, arguments of tools) is read by `read_json` alone;
docs/reference/json.md lists how each oddity is read.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from functools import cache, partial
from types import UnionType
from typing import Any, Final, Literal, TypeAlias, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import orjson

from lightning_spans.schema.spans import Json

R = TypeVar("R")
Convert: TypeAlias = Callable[[Any], Any]


def dumps(value: Json) -> bytes:
    """Write JSON; NaN and the infinities, which JSON lacks, become null.

    What orjson rejects (integers beyond 64 bits, lone surrogates, keys that are not text) is written by the standard
    library, after a leading space that tells `loads` to read it the same way: orjson would round such integers.

    Raises:
        ValueError: the value is not JSON-like.
    """
    try:
        return orjson.dumps(value, default=_plain)
    except TypeError:
        try:
            text = json.dumps(value, default=_plain)
            return b" " + json.dumps(json.loads(text, parse_constant=lambda _: None)).encode()
        except TypeError as error:
            raise ValueError(f"not JSON-like: {error}") from None


def loads(text: bytes | str) -> Json:
    """Read JSON, including what `dumps` marked as beyond orjson.

    Raises:
        ValueError: it is not JSON.
    """
    if text[:1] not in (b" ", " "):
        try:
            return orjson.loads(text)
        except orjson.JSONDecodeError:
            # perhaps only a lone surrogate, which the standard library accepts; otherwise it raises the same error
            pass
    return json.loads(text)


def _plain(value: object) -> Json:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if hasattr(value, "item"):  # a scalar of numpy or torch
        return value.item()
    raise TypeError(f"{type(value).__name__} is not JSON-like")


class JsonText(Mapping[str, Json]):
    """A JSON object that stays text until it is used: most request bodies are never read again."""

    __slots__ = ("_text", "_value")

    def __init__(self, text: str) -> None:
        self._text = text
        self._value: dict[str, Json] | None = None

    def _read(self) -> dict[str, Json]:
        if self._value is None:
            value = loads(self._text)
            self._value = value if isinstance(value, dict) else {}
        return self._value

    def __getitem__(self, key: str) -> Json:
        return self._read()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._read())

    def __len__(self) -> int:
        return len(self._read())

    def __repr__(self) -> str:
        return f"JsonText({self._text!r})"

    def __reduce__(self) -> tuple[type[JsonText], tuple[str]]:
        return JsonText, (self._text,)


def to_json(record: Any) -> dict[str, Json]:
    """Return a record as a JSON object whose keys are its field names."""
    kind: Any = type(record)
    return {
        name: getattr(record, name) if write is None else write(getattr(record, name)) for name, write in _writers(kind)
    }


def from_json(kind: type[R], data: Json) -> R:
    """Read what `to_json` wrote. Unknown keys are ignored, so that an older reader accepts a newer writer's records.

    Args:
        kind: the record's class.
        data: a JSON object, from anyone.

    Raises:
        ValueError: it is not an object, a required field is missing, or a field has the wrong type; names the field.
    """
    if not isinstance(data, Mapping):
        raise ValueError(f"a {kind.__name__} must be a JSON object, not {type(data).__name__}")
    record: Any = kind
    values = {}
    for name, read in _readers(record):
        if name in data:
            try:
                values[name] = read(data[name])
            except (TypeError, ValueError, OverflowError) as error:
                raise ValueError(f"{kind.__name__}.{name}: {error}") from None
    try:
        return cast(R, record(**values))
    except TypeError as error:
        raise ValueError(f"{kind.__name__}: {str(error).partition('() ')[2] or error}") from None


def field_types(kind: Any) -> dict[str, Any]:
    """Return the types of a record's fields by name, in the order of its class."""
    hints = get_type_hints(kind)
    return {name: hints[name] for name in kind.__dataclass_fields__}


@cache
def _writers(kind: Any) -> tuple[tuple[str, Convert | None], ...]:
    return tuple((name, _writer(hint)) for name, hint in field_types(kind).items())


@cache
def _readers(kind: Any) -> tuple[tuple[str, Convert], ...]:
    return tuple((name, _reader(hint)) for name, hint in field_types(kind).items())


def _parts(hint: Any) -> tuple[Any, Any, bool]:
    """Split a type into its origin, its arguments, and whether it may be None."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType) and type(None) in inner:
        kind, held, _ = _parts(next(part for part in inner if part is not type(None)))
        return kind, held, True
    return origin or hint, inner[0] if origin in (tuple, Sequence) else inner, False


def _writer(hint: Any) -> Convert | None:
    """Return what converts a field's value to plain JSON; None: it is plain already."""
    kind, held, optional = _parts(hint)
    write: Convert | None = None
    if kind in (tuple, Sequence):
        inner = _writer(held)
        write = list if inner is None else lambda items: [inner(item) for item in items]
    elif kind is Mapping:
        write = dict
    elif is_dataclass(kind):
        write = to_json
    return write if write is None or not optional else partial(_unless_none, write)


def _reader(hint: Any) -> Convert:
    """Return what reads a field's value from JSON, and raises TypeError or ValueError for another type."""
    kind, held, optional = _parts(hint)
    if kind in (tuple, Sequence):
        read: Convert = _ARRAYS.get(held) or partial(_items, _reader(held))
    elif kind is Literal:
        read = partial(_one_of, held)
    elif isinstance(kind, type) and is_dataclass(kind):
        read = partial(from_json, kind)
    else:
        read = _PLAIN[kind]
    return partial(_unless_none, read) if optional else read


def _unless_none(convert: Convert, value: Any) -> Any:
    return None if value is None else convert(value)


def _text(value: Json) -> str:
    if isinstance(value, str):
        return value
    raise TypeError(f"must be text, not {type(value).__name__}")


def _whole(value: Json) -> int:
    if type(value) is int:
        return value
    raise TypeError(f"must be a whole number, not {type(value).__name__}")


def _flag(value: Json) -> bool:
    if isinstance(value, bool):
        return value
    raise TypeError(f"must be true or false, not {type(value).__name__}")


def _number(value: Json) -> float:
    if type(value) in (int, float):
        return float(value)
    raise TypeError(f"must be a number, not {type(value).__name__}")


def _object(value: Json) -> Mapping[str, Json]:
    if isinstance(value, Mapping):
        return value
    raise TypeError(f"must be an object, not {type(value).__name__}")


def _list(value: Json) -> list[Json]:
    if isinstance(value, (list, tuple)):
        return list(value)
    raise TypeError(f"must be a list, not {type(value).__name__}")


def _items(read: Convert, value: Json) -> tuple[Any, ...]:
    return tuple(read(item) for item in _list(value))


def _token_ids(value: Json) -> tuple[int, ...]:
    return tuple(array("i", _list(value)))  # fast C code that rejects anything but 32-bit whole numbers


def _numbers(value: Json) -> tuple[float, ...]:
    return tuple(array("d", _list(value)))


def _one_of(known: Sequence[str], value: Json) -> Json:
    if value in known:
        return value
    raise ValueError(f"must be one of {', '.join(known)}, not {value!r}")


_PLAIN: Final[Mapping[Any, Convert]] = {str: _text, bool: _flag, int: _whole, float: _number, Mapping: _object}
_ARRAYS: Final[Mapping[Any, Convert]] = {int: _token_ids, float: _numbers}


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
        return _without_halves(json.loads(written, parse_int=_integer))
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def read_object(text: str | bytes | bytearray | None) -> dict[str, Any] | None:
    """Parse a JSON object; None if it is not one."""
    try:
        found = read_json(text or b"")
    except (ValueError, TypeError):
        return None
    return found if isinstance(found, dict) else None


def _integer(digits: str) -> int | float:
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
