"""Single values of a request's body: parsed, or rejected with what they must be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_trainer.gateway.http.errors import Refusal, bad_request


def format_value(value: Any) -> str:
    """Return a value for a message, shortened."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def wrong(name: str, value: Any, expected: str) -> Refusal:
    """Return the error for an invalid value, with what it must be."""
    return bad_request(f"{name}={format_value(value)}: must be {expected}", "invalid_value")


def flag(body: Mapping[str, Any], name: str, *, default: bool = False) -> bool:
    """Read true or false.

    Raises:
        Refusal: it is neither.
    """
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise wrong(name, value, "true or false")
    return value


def whole(body: Mapping[str, Any], name: str, default: int | None, *, low: int, high: int = 2**31 - 1) -> int | None:
    """Read a whole number.

    Raises:
        Refusal: it is not one, or out of range.
    """
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise wrong(name, value, f"a whole number from {low} to {high}")
    return value


def refuse_several_answers(body: Mapping[str, Any]) -> None:
    """Reject `n` other than 1 on a surface whose answer has no choices.

    Raises:
        Refusal: more than one answer is requested.
    """
    if body.get("n") not in (None, 1):
        raise wrong("n", body["n"], "1: this form has one answer. Leave n out, or use /v1/chat/completions")


def number(body: Mapping[str, Any], name: str, default: float | None, *, low: float, high: float) -> float | None:
    """Read a number.

    Raises:
        Refusal: it is not one, or out of range.
    """
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise wrong(name, value, f"a number from {low:g} to {high:g}")
    return float(value)


def read_list(name: str, value: Any) -> list[Any]:
    """Read a list.

    Raises:
        Refusal: it is not one.
    """
    if not isinstance(value, list):
        raise wrong(name, value, "a list")
    return value
