"""``POST /v1/chat/completions``: the common form itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from lightning_trainer.server.draft import Draft
from lightning_trainer.server.refusals import Refusal
from lightning_trainer.server.sse import DONE, event


class ChatSurface:
    """Chat completions."""

    path = "/v1/chat/completions"
    id_prefix = "chatcmpl-"

    def begin(self, body: Mapping[str, Any], owner: str | None) -> ChatExchange:  # noqa: ARG002 - nothing is kept
        """Read a request: see `Surface.begin`."""
        return ChatExchange(body)

    def refusal(self, refusal: Refusal) -> bytes:
        """Give an error as OpenAI gives it."""
        return refusal.body()


class ChatExchange:
    """One request and its answer, passed as they are."""

    keeps_id = True

    def __init__(self, asked: Mapping[str, Any]) -> None:
        self.asked = asked

    def whole(self, draft: Draft, completion: dict[str, Any]) -> bytes:  # noqa: ARG002
        """See `Exchange`."""
        return orjson.dumps(completion)

    def chunk(self, draft: Draft, chunk: dict[str, Any]) -> bytes:  # noqa: ARG002
        """See `Exchange`."""
        return event(chunk)

    def end(self, draft: Draft) -> bytes:  # noqa: ARG002
        """See `Exchange`."""
        return DONE

    def failed(self, draft: Draft, refusal: Refusal) -> bytes:  # noqa: ARG002
        """Give an error without ``[DONE]`` after it: clients raise on it."""
        return b"data: " + refusal.body() + b"\n\n"
