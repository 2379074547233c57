"""The format of every error that the server sends: OpenAI's or Anthropic's, so that their clients raise properly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from lightning_spans.errors import RefusedError
from lightning_spans.schema.json import dumps
from lightning_spans.schema.spans import Json
from lightning_trainer.gateway.http.masking import mask_secrets

_ANTHROPIC: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


@dataclass(eq=False)
class Refusal(Exception):  # noqa: N818 - a refusal is an answer, not a failure of ours
    """A rejected request, and the answer to its sender.

    Attributes:
        status: HTTP status.
        message: what is wrong and what to do about it.
        kind: OpenAI's ``type``.
        code: OpenAI's ``code``; None if there is none.
        headers: sent with the response, such as ``Retry-After``.
    """

    status: int
    message: str
    kind: str = "invalid_request_error"
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.message = mask_secrets(self.message)  # it is sent to agents, and written to the store and to logs

    def __str__(self) -> str:
        return self.message

    def body(self) -> bytes:
        """Return the JSON body, which is also the data of an error event in a stream."""
        return dumps({"error": {"message": self.message, "type": self.kind, "code": self.code, "param": None}})

    def anthropic(self) -> dict[str, Json]:
        """Return the body in Anthropic's format."""
        kind = _ANTHROPIC.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": self.message, "code": self.code}}

    def body_for(self, path: str) -> bytes:
        """Return the JSON body in the format of the requested surface."""
        anthropic = path == "/v1/messages" or path.startswith("/v1/messages/")
        return dumps(self.anthropic()) if anthropic else self.body()


def bad_request(message: str, code: str | None = None) -> Refusal:
    """Return a 400: the request is invalid."""
    return Refusal(400, message, code=code)


def unauthorized(message: str) -> Refusal:
    """Return a 401: no key, or an invalid one."""
    return Refusal(401, message, "authentication_error", "invalid_api_key", {"www-authenticate": "Bearer"})


def forbidden(message: str) -> Refusal:
    """Return a 403: a valid key that does not permit this."""
    return Refusal(403, message, "permission_error", "forbidden")


def store_down(error: BaseException) -> Refusal:
    """Return a 503 because the call cannot be recorded now and so is not answered; a 400 if it never can be."""
    if isinstance(error, RefusedError):
        return bad_request(str(error))
    why = str(error).rstrip(".")
    message = f"the store can't keep this now: {why}. Try again; if it fails again, see /healthz and the server's log."
    return Refusal(503, message, "server_error", "store_unavailable", {"retry-after": "1"})


def too_large(limit: int) -> Refusal:
    """Return a 413: the body, or its unpacked form, is over the limit."""
    return Refusal(413, f"the body is larger than {limit} bytes", code="request_too_large")
