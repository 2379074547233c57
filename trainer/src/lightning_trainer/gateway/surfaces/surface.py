"""The common base of surfaces: a path, and a translation to and from the one form that engines and upstreams use.

That form is OpenAI's chat completion: a request's body, a whole completion, and its chunks. `prompt`, a text or token
ids, may replace `messages`. What a surface does not translate is passed on: the engine or upstream accepts or rejects
it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from lightning_trainer.gateway.http.errors import Refusal
from lightning_trainer.gateway.request.pending import PendingCall


class Exchange(Protocol):
    """One request and its answer, on one surface."""

    asked: Mapping[str, Any]  # the request as a chat completion
    left_out: Mapping[str, Any]  # what it requested and does not need, as it was given; recorded
    demands_limit: bool  # whether requests of this form must name a limit, which is then not the author's own choice
    keeps_id: bool  # whether the client gets the id that an upstream gave its answer

    def whole(self, pending: PendingCall, completion: dict[str, Any]) -> bytes:
        """Translate a whole answer; its record is finished."""
        ...

    def chunk(self, pending: PendingCall, chunk: dict[str, Any]) -> bytes:
        """Translate a chunk to events; empty if there is nothing to send."""
        ...

    def end(self, pending: PendingCall) -> bytes:
        """Return the events that end a stream; its record is finished."""
        ...

    def failed(self, pending: PendingCall, refusal: Refusal) -> bytes:
        """Return the events that end a failed stream."""
        ...


class Surface(Protocol):
    """One way to request an answer."""

    path: str
    id_prefix: str  # of response ids that are created here

    def begin(self, body: Mapping[str, Any], owner: str | None) -> Exchange:
        """Read a request.

        Args:
            body: as received.
            owner: the requesting attempt; one attempt's messages are never given to another. None: an admin.

        Raises:
            Refusal: it is malformed, or requests what no chat completion supports.
        """
        ...

    def refusal(self, refusal: Refusal) -> bytes:
        """Return the body of an error for a client of this surface."""
        ...
