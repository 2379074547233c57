"""What goes wrong with an upstream, and what the agent is told of it."""

from __future__ import annotations

from typing import Any

import orjson

from lightning_trainer.server.refusals import Refusal


class BrokenError(Exception):
    """A replica did not answer, or not to the end."""

    def __init__(self, refusal: Refusal, *, stale: bool = False) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal
        self.stale = stale  # the connection was closed before anything came of it


def failed(what: str) -> Refusal:
    """Give a 502: the server could not be asked, or sent no answer."""
    return Refusal(502, f"the model's server {what}", "server_error", "upstream_failed")


def refusal_of(status: int, body: bytes, retry_after: str | None = None) -> Refusal:
    """Give an upstream's own error with its status, message and code."""
    try:
        data = orjson.loads(body)
        error = data.get("error", data)  # older vLLM sends the error's fields at the top
        message, kind, code = error["message"], error.get("type"), error.get("code")
    except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError):
        message, kind, code = body[:500].decode(errors="replace"), None, None
    message = message or f"the model's server answered {status} without a word"  # vLLM's way for its own failures
    headers = {} if retry_after is None else {"retry-after": retry_after}
    return Refusal(status, str(message), str(kind or "upstream_error"), None if code is None else str(code), headers)


def object_of(body: bytes) -> dict[str, Any]:
    """Read a reply or a chunk.

    Raises:
        Refusal: it is no JSON object, or an error.
    """
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise failed(f"sent no JSON: {error}") from None
    if not isinstance(data, dict):
        raise failed("sent no JSON object")
    if "error" in data and "choices" not in data:
        raise refusal_of(502, body)
    return data
