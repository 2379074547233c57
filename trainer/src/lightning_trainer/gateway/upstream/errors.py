"""Failures of an upstream, and the errors that the agent gets."""

from __future__ import annotations

import re
from typing import Any, Final

from lightning_spans.chat.stream import EventReader
from lightning_spans.schema.json import read_json
from lightning_trainer.gateway.http.errors import Refusal
from lightning_trainer.gateway.http.weight import deeper_than, too_heavy
from lightning_trainer.gateway.intake.intake import MAX_DEPTH

_SMALL: Final = 64 * 1024  # bytes; so few cannot become anything large
_MOST_BYTES: Final = 512 << 20  # of memory; 100,000 tokens with ids and log-probabilities take 100 MB
_RETRY_AFTER: Final = re.compile(r"\d{1,7}(\.\d{1,3})?|[A-Za-z]{3}, [\w: ]{18,26}")  # seconds, or a date


class BrokenError(Exception):
    """A replica did not answer, or not completely."""

    def __init__(self, refusal: Refusal, *, stale: bool = False, late: bool = False) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal
        self.stale = stale  # the connection was closed before any of it arrived
        self.late = late  # the answer took longer than answers may take, which a policy can bring about


def upstream_failure(what: str) -> Refusal:
    """Return a 502: the server could not be reached, or sent no answer."""
    return Refusal(502, f"the model's server {what}", "server_error", "upstream_failed")


def refusal_of(status: int, body: bytes, retry_after: str | None = None) -> Refusal:
    """Return an upstream's own error with its status, message and code."""
    try:
        data = _read(body)
        error = data.get("error", data)  # older vLLM puts the error's fields at the top level
        message, kind, code = error["message"], error.get("type"), error.get("code")
    except (ValueError, AttributeError, KeyError, TypeError):
        message, kind, code = body[:500].decode(errors="replace"), None, None
    message = message or f"the model's server answered {status} without a message"  # vLLM's format for its own failures
    headers = {"retry-after": retry_after} if retry_after is not None and _RETRY_AFTER.fullmatch(retry_after) else {}
    return Refusal(status, str(message), str(kind or "upstream_error"), None if code is None else str(code), headers)


def events_of(events: EventReader, piece: bytes) -> list[bytes]:
    """Return the events that are complete with a piece of a stream.

    Raises:
        Refusal: one is larger than any that a model server sends.
    """
    try:
        return events.feed(piece)
    except ValueError as error:
        raise upstream_failure(f"sent {error}") from None


def object_of(body: bytes) -> dict[str, Any]:
    """Parse a reply or a chunk.

    Raises:
        Refusal: it is not a JSON object, or an error.
    """
    try:
        data = _read(body)
    except ValueError as error:
        raise upstream_failure(f"sent no JSON: {error}") from None
    if not isinstance(data, dict):
        raise upstream_failure("sent no JSON object")
    if "error" in data and "choices" not in data:
        raise refusal_of(502, body)
    return data


def _read(body: bytes) -> Any:
    """Parse JSON whose size and depth are those of a reply.

    Raises:
        ValueError: it is not JSON, would take too much memory, or could not be sent on.
    """
    if len(body) > _SMALL and too_heavy(body, _MOST_BYTES):
        raise ValueError(f"it would take more than {_MOST_BYTES} bytes of memory")
    data = read_json(body)
    if deeper_than(body, data, MAX_DEPTH):
        raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels")
    return data
