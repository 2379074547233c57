"""What a tool's own code returned or raised, as JSON from which a replay can restore it.

Plain JSON is written as it is. Everything else is an object with the key ``$type``: tuples, sets, bytes, times, arrays,
dataclasses and pydantic models by their class, and exceptions. Only classes that the program has already imported are
restored: no text leads to an import, and none to a call of anything but dataclasses, models and exceptions.
"""

from __future__ import annotations

import base64
import dataclasses
import datetime as dt
import decimal
import enum
import math
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any, Final

from lightning_spans.errors import RecordedToolError
from lightning_spans.schema.json import dumps, loads
from lightning_spans.schema.spans import Json

_TYPE: Final = "$type"
AGAIN: Final = "again"  # the tool ended with a framework's way to wait: its own code must run again
_DEEPEST: Final = 60


class RestoredValue:
    """A restored value; a class, because None is a value too.

    Attributes:
        value: what was returned; None if something was raised.
        error: what was raised; None if something was returned.
        again: whether there is neither, because the tool only began.
    """

    __slots__ = ("again", "error", "value")

    def __init__(self, value: Any = None, error: BaseException | None = None, *, again: bool = False) -> None:
        self.value = value
        self.error = error
        self.again = again

    def outcome(self) -> Any:
        """Return the value, or raise the error."""
        if self.error is not None:
            raise self.error
        return self.value


def write(value: object) -> str:
    """Return a value as JSON text.

    Raises:
        TypeError: it contains something that cannot be restored; the message names its type.
    """
    return dumps(encode(value)).decode()


def encode(value: object) -> Json:
    """Return a value as JSON.

    Raises:
        TypeError: it contains something that cannot be restored; the message names its type.
    """
    return _encode_value(value, 0)


def write_error(error: BaseException) -> str:
    """Return an exception as JSON text: its class and its message."""
    about = {"class": _name(type(error)), "message": str(error), "args": _args(error)}
    return dumps({_TYPE: "error", **about, "exception": isinstance(error, Exception)}).decode()


def write_lost(reason: Exception) -> str:
    """Return the text that says that a value could not be recorded, and why."""
    return dumps({_TYPE: "lost", "reason": str(reason)}).decode()


def write_again() -> str:
    """Return the text that says that a tool only began."""
    return dumps({_TYPE: AGAIN}).decode()


def read(text: str) -> RestoredValue:
    """Read what one of the functions above wrote.

    Raises:
        ValueError: it is no such text, or is of a class that the program has not imported.
    """
    data = loads(text)
    if isinstance(data, dict) and data.get(_TYPE) == AGAIN:
        return RestoredValue(again=True)
    if isinstance(data, dict) and data.get(_TYPE) == "lost":
        raise ValueError(f"it contained {data['reason']}, which can't be stored")
    if isinstance(data, dict) and data.get(_TYPE) == "error":
        if not data["exception"]:
            raise ValueError(f"the tool was cut short by {data['class'].rpartition(':')[2]}")
        return RestoredValue(error=error_of(data["class"], data["message"], data["args"]))
    try:
        return RestoredValue(_decode_value(data))
    except (KeyError, TypeError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None


def error_of(kind: str, message: str, args: Json = None) -> Exception:
    """Return an exception of the named class with this text; `RecordedToolError` if there is no such class.

    Args:
        kind: its qualified name, after its module and a colon if that is known.
        message: its `str`.
        args: its arguments, if known.
    """
    found = _error_class(kind)
    if found is None:
        return RecordedToolError(f"{kind.rpartition(':')[2]}: {message}" if kind else message)
    for given in ([] if args is None else [args]) + [[message]]:
        try:
            error = found(*given)
        except Exception:  # noqa: BLE001, S112 - it wants something else
            continue
        if str(error) == message:
            return error
    told: Any = type(found.__name__, (found,), {"__init__": _no_init, "__str__": lambda _: message})
    made: Exception = told()
    made.args = (message,)
    return made


def _no_init(self: object, *_: object) -> None:
    """Accept any arguments: the class's own constructor may need values that were not recorded."""


def _args(error: BaseException) -> Json:
    return list(error.args) if all(_is_plain(arg) for arg in error.args) else None


def _is_plain(value: object) -> bool:
    return value is None or type(value) in (str, int, float, bool)


def _error_class(kind: str) -> type[Exception] | None:
    module, _, name = kind.rpartition(":")
    found = _class(kind) if module else getattr(sys.modules["builtins"], name, None)
    if not module and found is None:
        found = next((known for known in _subclasses(Exception) if known.__qualname__ == name), None)
    return found if isinstance(found, type) and issubclass(found, Exception) else None


def _subclasses(kind: type[Exception]) -> Iterator[type[Exception]]:
    for known in type.__subclasses__(kind):
        yield known
        yield from _subclasses(known)


def _name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _class(name: str) -> Any:
    """Find a class of an imported module; None if there is none."""
    module, _, path = name.rpartition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    return found


def _encode_value(value: Any, depth: int) -> Json:
    kind = type(value)
    if _is_plain(value) and (kind is not float or math.isfinite(value)):
        return value
    if depth > _DEEPEST:
        raise TypeError(f"a value nested more than {_DEEPEST} levels deep")
    if kind is list:
        return [_encode_value(item, depth + 1) for item in value]
    if kind is dict:
        return _of_dict(value, depth)
    if kind in _ITEMS:
        return {_TYPE: kind.__name__, "items": [_encode_value(item, depth + 1) for item in value]}
    if kind in _TEXTS:
        return {_TYPE: kind.__name__, "value": _TEXTS[kind][0](value)}
    return _of_class(value, kind, depth)


def _of_dict(value: dict[Any, Any], depth: int) -> Json:
    if _TYPE not in value and all(type(key) is str for key in value):
        return {key: _encode_value(item, depth + 1) for key, item in value.items()}
    return {_TYPE: "dict", "items": [[_encode_value(side, depth + 1) for side in pair] for pair in value.items()]}


def _of_class(value: Any, kind: type, depth: int) -> Json:
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)) and not value.dtype.hasobject:
        data = base64.b64encode(numpy.ascontiguousarray(value).tobytes()).decode()
        about = {"dtype": value.dtype.str, "shape": list(value.shape), "scalar": isinstance(value, numpy.generic)}
        return {_TYPE: "numpy", **about, "data": data}
    if isinstance(value, PurePath):
        return {_TYPE: "path", "value": str(value)}
    if _class(_name(kind)) is kind:  # a class within a function could not be found
        if isinstance(value, enum.Enum):
            return {_TYPE: "enum", "class": _name(kind), "name": value.name}
        if dataclasses.is_dataclass(kind):
            fields = [field for field in dataclasses.fields(kind) if field.init]
            held = {field.name: _encode_value(getattr(value, field.name), depth + 1) for field in fields}
            return {_TYPE: "dataclass", "class": _name(kind), "fields": held}
        if _is_model(kind):
            return {_TYPE: "model", "class": _name(kind), "value": value.model_dump(mode="json", exclude_unset=True)}
        if issubclass(kind, tuple) and hasattr(kind, "_fields"):
            return {
                _TYPE: "namedtuple",
                "class": _name(kind),
                "items": [_encode_value(item, depth + 1) for item in value],
            }
    raise TypeError(f"{kind.__module__}.{kind.__qualname__}")


def _is_model(kind: type) -> bool:
    return callable(getattr(kind, "model_dump", None)) and callable(getattr(kind, "model_validate", None))


def _decode_value(data: Json) -> Any:
    if isinstance(data, list):
        return [_decode_value(item) for item in data]
    if not isinstance(data, dict):
        return data
    if _TYPE not in data:
        return {key: _decode_value(item) for key, item in data.items()}
    return _READ[data[_TYPE]](data)


def _find_class(name: str, fits: Callable[[Any], bool]) -> Any:
    found = _class(name)
    if not isinstance(found, type) or not fits(found):
        raise TypeError(f"{name} is not a class that the program has imported so far")
    return found


def _read_dataclass(data: Mapping[str, Json]) -> Any:
    fields = {name: _decode_value(value) for name, value in data["fields"].items()}
    return _find_class(data["class"], dataclasses.is_dataclass)(**fields)


def _read_numpy(data: Mapping[str, Json]) -> Any:
    numpy: Any = sys.modules["numpy"]
    array = numpy.frombuffer(base64.b64decode(data["data"]), dtype=numpy.dtype(data["dtype"])).reshape(data["shape"])
    return array[()] if data["scalar"] else array.copy()


def _read_namedtuple(data: Mapping[str, Json]) -> Any:
    kind = _find_class(data["class"], lambda found: issubclass(found, tuple))
    return kind(*(_decode_value(item) for item in data["items"]))


_ITEMS: Final[Mapping[type, Callable[[Any], Any]]] = {tuple: tuple, set: set, frozenset: frozenset}
_TEXTS: Final[Mapping[type, tuple[Callable[[Any], str], Callable[[str], Any]]]] = {
    float: (repr, float),
    bytes: (lambda value: base64.b64encode(value).decode(), base64.b64decode),
    complex: (repr, complex),
    decimal.Decimal: (str, decimal.Decimal),
    uuid.UUID: (str, uuid.UUID),
    dt.datetime: (dt.datetime.isoformat, dt.datetime.fromisoformat),
    dt.date: (dt.date.isoformat, dt.date.fromisoformat),
    dt.time: (dt.time.isoformat, dt.time.fromisoformat),
    dt.timedelta: (
        lambda value: f"{value.days} {value.seconds} {value.microseconds}",
        lambda text: dt.timedelta(*map(int, text.split())),
    ),
}


def _items_reader(make: Callable[[Any], Any]) -> Callable[[Mapping[str, Json]], Any]:
    return lambda data: make(_decode_value(item) for item in data["items"])


def _text_reader(parse: Callable[[str], Any]) -> Callable[[Mapping[str, Json]], Any]:
    return lambda data: parse(data["value"])


_READ: Final[Mapping[str, Callable[[Mapping[str, Json]], Any]]] = {
    "dict": lambda data: {_decode_value(key): _decode_value(value) for key, value in data["items"]},
    "dataclass": _read_dataclass,
    "model": lambda data: _find_class(data["class"], _is_model).model_validate(data["value"]),
    "enum": lambda data: _find_class(data["class"], lambda found: issubclass(found, enum.Enum))[data["name"]],
    "path": lambda data: Path(data["value"]),
    "namedtuple": _read_namedtuple,
    "numpy": _read_numpy,
    **{kind.__name__: _items_reader(make) for kind, make in _ITEMS.items()},
    **{kind.__name__: _text_reader(parse) for kind, (_, parse) in _TEXTS.items()},
}
