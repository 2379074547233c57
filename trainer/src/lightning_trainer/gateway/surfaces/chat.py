"""``POST /v1/chat/completions``: the common form itself."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from lightning_spans.schema.json import dumps
from lightning_trainer.gateway.http.errors import Refusal
from lightning_trainer.gateway.http.events import DONE, event
from lightning_trainer.gateway.request.pending import PendingCall


class ChatSurface:
    """Chat completions."""

    path = "/v1/chat/completions"
    id_prefix = "chatcmpl-"

    def begin(self, body: Mapping[str, Any], owner: str | None) -> ChatExchange:  # noqa: ARG002 - nothing is kept
        """Read a request; see `Surface.begin`."""
        return ChatExchange(body)

    def refusal(self, refusal: Refusal) -> bytes:
        """Return an error in OpenAI's format."""
        return refusal.body()


class ChatExchange:
    """One request and its answer, passed on unchanged."""

    keeps_id = True
    demands_limit = False
    left_out: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, asked: Mapping[str, Any]) -> None:
        self.asked = asked

    def whole(self, pending: PendingCall, completion: dict[str, Any]) -> bytes:  # noqa: ARG002
        """See `Exchange`."""
        return dumps(completion)

    def chunk(self, pending: PendingCall, chunk: dict[str, Any]) -> bytes:  # noqa: ARG002
        """See `Exchange`."""
        return event(chunk)

    def end(self, pending: PendingCall) -> bytes:  # noqa: ARG002
        """See `Exchange`."""
        return DONE

    def failed(self, pending: PendingCall, refusal: Refusal) -> bytes:  # noqa: ARG002
        """Return an error without ``[DONE]`` after it: clients raise on it."""
        return b"data: " + refusal.body() + b"\n\n"
