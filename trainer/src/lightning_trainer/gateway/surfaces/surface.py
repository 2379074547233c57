"""What every surface is: a path, and a translation to and from the one form that engines and upstreams speak.

That form is OpenAI's chat completion: a request's body, a whole completion, and chunks of one. `prompt`, a text or
token ids, may stand in place of `messages`. What a surface does not translate passes through: whoever answers takes it
or refuses it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from lightning_trainer.gateway.http.errors import Refusal
from lightning_trainer.gateway.request.pending import PendingCall


class Exchange(Protocol):
    """One request and its answer, on one surface."""

    asked: Mapping[str, Any]  # the request as a chat completion
    left_out: Mapping[str, Any]  # what it asked for and does not need, as it was asked: goes on record
    demands_limit: bool  # whether each request of this form has to name a limit, which then is no wish of its author's
    keeps_id: bool  # whether the client sees the id that an upstream gave its answer

    def whole(self, pending: PendingCall, completion: dict[str, Any]) -> bytes:
        """Translate a whole answer; the record is finished by then."""
        ...

    def chunk(self, pending: PendingCall, chunk: dict[str, Any]) -> bytes:
        """Translate a chunk to events; empty when there is nothing to tell."""
        ...

    def end(self, pending: PendingCall) -> bytes:
        """Return the events that end a stream; the record is finished by then."""
        ...

    def failed(self, pending: PendingCall, refusal: Refusal) -> bytes:
        """Return the events that end a stream that failed."""
        ...


class Surface(Protocol):
    """One way to ask."""

    path: str
    id_prefix: str  # of response ids that are made here

    def begin(self, body: Mapping[str, Any], owner: str | None) -> Exchange:
        """Read a request.

        Args:
            body: as received.
            owner: the attempt that asks; what one attempt said is never told to another. None: an admin.

        Raises:
            Refusal: it is malformed, or asks for what no chat completion does.
        """
        ...

    def refusal(self, refusal: Refusal) -> bytes:
        """Return the body that tells a client of this surface why not."""
        ...
