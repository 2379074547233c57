"""The JSON form of every record: what lies in text columns and what goes over HTTP. Its one home, both ways."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar, get_args

import orjson

from lightning_spans import spans
from lightning_spans.context import Attempt
from lightning_spans.rewards import Reward
from lightning_spans.spans import Json, Span, Status
from lightning_spans.store import AttemptRecord, AttemptStatus, Call, Choice, Rollout, RolloutStatus

R = TypeVar("R", Span, Call, Choice, Reward, Rollout, AttemptRecord, Attempt)


def dumps(value: Json) -> bytes:
    """Write JSON.

    What orjson refuses (integers beyond 64 bits, lone surrogates, keys that are not text) is written by the standard
    library, after a leading space that tells `loads` to read it the same way: orjson would round such integers.
    NaN and the infinities, which JSON has not, become null.

    Raises:
        ValueError: the value is not JSON-like.
    """
    try:
        return orjson.dumps(value, default=_plain)
    except TypeError:
        try:
            return b" " + json.dumps(value, default=_plain).encode()
        except TypeError as error:
            raise ValueError(f"not JSON-like: {error}") from None


def loads(text: bytes | str) -> Json:
    """Read JSON, also what `dumps` marked as beyond orjson.

    Raises:
        ValueError: it is not JSON.
    """
    if text[:1] not in (b" ", " "):
        try:
            return orjson.loads(text)
        except orjson.JSONDecodeError:
            pass  # perhaps only a lone surrogate, which the standard library reads; else it raises the same complaint
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
    """A JSON object that stays text until someone looks into it: most request bodies are never read again."""

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


def to_json(record: Span | Call | Choice | Reward | Rollout | AttemptRecord | Attempt) -> dict[str, Json]:
    """Give a record as a JSON object whose keys are its field names."""
    if isinstance(record, Span):
        return spans.to_json(record)
    return {name: _value(getattr(record, name)) for name in record.__dataclass_fields__}


def _value(value: Any) -> Json:
    if isinstance(value, tuple):
        return [to_json(item) if isinstance(item, Choice) else item for item in value]
    if isinstance(value, Mapping):
        return dict(value)
    return to_json(value) if isinstance(value, (Rollout, Attempt)) else value


def from_json(kind: type[R], data: Json) -> R:
    """Read what `to_json` wrote. Unknown keys are ignored: an older reader takes a newer writer's records.

    Args:
        kind: the record's class.
        data: a JSON object, from anyone.

    Raises:
        ValueError: it is no object, a required field is missing, or a field has the wrong type; names the field.
    """
    if not isinstance(data, Mapping):
        raise ValueError(f"a {kind.__name__} must be a JSON object, not {type(data).__name__}")
    values = {}
    for name, read in _READERS[kind].items():
        if name in data:
            try:
                values[name] = read(data[name])
            except (TypeError, ValueError, OverflowError) as error:
                raise ValueError(f"{kind.__name__}.{name}: {error}") from None
    try:
        return kind(**values)
    except TypeError as error:
        raise ValueError(f"{kind.__name__}: {str(error).partition('() ')[2] or error}") from None


def _text(value: Json) -> str:
    if isinstance(value, str):
        return value
    raise TypeError(f"must be text, not {type(value).__name__}")


def _whole(value: Json) -> int:
    if type(value) is int:
        return value
    raise TypeError(f"must be a whole number, not {type(value).__name__}")


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


def _ids(value: Json) -> tuple[int, ...]:
    return tuple(array("i", _list(value)))  # C speed, and refuses what is no 32-bit whole number


def _numbers(value: Json) -> tuple[float, ...]:
    return tuple(array("d", _list(value)))


def _maybe(read: Callable[[Json], Any]) -> Callable[[Json], Any]:
    return lambda value: None if value is None else read(value)


def _one_of(names: Any) -> Callable[[Json], Any]:
    known = get_args(names)

    def read(value: Json) -> Any:
        if value in known:
            return value
        raise ValueError(f"must be one of {', '.join(known)}, not {value!r}")

    return read


_READERS: dict[type, dict[str, Callable[[Json], Any]]] = {
    Span: {
        **dict.fromkeys(("operation", "name", "trace_id", "span_id", "status_message", "origin"), _text),
        **dict.fromkeys(("parent_id", "agent", "rollout_id", "attempt_id"), _maybe(_text)),
        **dict.fromkeys(("start_ns", "end_ns"), _whole),
        "status": _one_of(Status),
        "attributes": _object,
    },
    Choice: {
        "index": _whole,
        "token_ids": _maybe(_ids),
        "logprobs": _maybe(_numbers),
        "finish_reason": _maybe(_text),
        "message": _object,
    },
    Call: {
        **dict.fromkeys(("call_id", "response_id", "policy", "origin"), _text),
        **dict.fromkeys(("trace_id", "span_id", "rollout_id", "attempt_id", "agent", "error"), _maybe(_text)),
        **dict.fromkeys(("start_ns", "end_ns", "policy_version"), _whole),
        "prompt_token_ids": _maybe(_ids),
        "choices": lambda value: tuple(from_json(Choice, item) for item in _list(value)),
        "request": _object,
        "sampling": _object,
    },
    Reward: {
        **dict.fromkeys(("rollout_id", "attempt_id", "source", "reward_id"), _text),
        **dict.fromkeys(("agent", "span_id"), _maybe(_text)),
        "value": _number,
    },
    Rollout: {
        **dict.fromkeys(("rollout_id", "group_id", "mode", "origin"), _text),
        "task": _object,
        "max_attempts": _whole,
        "timeout_s": _maybe(_number),
        "status": _one_of(RolloutStatus),
    },
    Attempt: {
        **dict.fromkeys(("rollout_id", "attempt_id", "model"), _text),
        **dict.fromkeys(("endpoint", "key"), _maybe(_text)),
        "agents": lambda value: tuple(_text(item) for item in _list(value)),
    },
    AttemptRecord: {
        **dict.fromkeys(("attempt_id", "worker"), _text),
        "rollout": lambda value: from_json(Rollout, value),
        **dict.fromkeys(("number", "fence", "lease_until_ns", "started_ns", "disturbed"), _whole),
        "ended_ns": _maybe(_whole),
        "status": _one_of(AttemptStatus),
        "error": _maybe(_text),
        "context": _maybe(lambda value: from_json(Attempt, value)),
    },
}
