"""Calls answered by the embedded engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_trainer.gateway.calls.answers import Ready, Record, Responder
from lightning_trainer.gateway.calls.models import NO_EMBEDDINGS
from lightning_trainer.gateway.calls.response import ResponseSender
from lightning_trainer.gateway.engine import Engine, abilities, disconnect, tool_format
from lightning_trainer.gateway.http.errors import bad_request
from lightning_trainer.gateway.prompt.continuation import Continuations
from lightning_trainer.gateway.request.chat_request import check_abilities, plainly, read_chat_request
from lightning_trainer.gateway.request.pending import PendingCall
from lightning_trainer.gateway.settings import Routing


class EmbeddedEngine:
    """Answers chat completions with one engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._answers = Responder(engine.tokenizer, tool_format(engine))

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and answer together."""
        return self.engine.max_model_len

    @property
    def continuations(self) -> Continuations:
        """The stored state of answered calls."""
        return self._answers.continuations

    @property
    def failure(self) -> str | None:
        """Why the newest request failed, if the engine itself failed."""
        return self._answers.failure

    def forget(self, attempt_id: str) -> None:
        """Drop what is kept for an attempt that has ended."""
        self._answers.forget(attempt_id)

    async def close(self) -> None:
        """Close the engine's connections on this event loop, which is ending."""
        await disconnect(self.engine)

    async def answer(self, pending: PendingCall, sender: ResponseSender, record: Record, routing: Routing) -> None:
        """Answer one request.

        Args:
            pending: its record. The body has been read, nothing else.
            sender: where the answer is sent.
            record: keeps the finished record; called once, before the answer's last byte.
            routing: as it was when the request arrived.

        Raises:
            Refusal: the request cannot be answered, or the engine failed. Nothing was sent unless `sender` has started.
        """
        request = read_chat_request(pending.requested.request)
        pending.sample(policy_version=self.engine.version)
        plain = (
            routing.plain and pending.requested.grant.attempt_id is not None
        )  # what is left out needs no engine's support
        check_abilities(plainly(request)[0] if plain else request, abilities(self.engine))
        request = self._answers.constrained(request)
        prompt = await self._answers.bounded_prompt(
            request, pending.requested.grant.attempt_id, self.engine.max_model_len
        )
        await self._answers.draw(Ready(request, prompt, self.engine), pending, sender, record, routing)

    def remember(self, pending: PendingCall) -> None:
        """Note a call that was answered from a record; see `Responder.remember`."""
        self._answers.remember(pending)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens."""
        return self._answers.chat.decode(ids)

    async def count(self, request: Mapping[str, Any]) -> int:
        """Count the tokens of a request's prompt.

        Raises:
            Refusal: the request cannot be answered, for example because it is larger than a context can be.
        """
        prompt = await self._answers.bounded_prompt(read_chat_request(request), None, self.max_model_len)
        return 0 if prompt is None else len(prompt.ids)

    async def embeddings(self, body: Mapping[str, Any]) -> bytes:  # noqa: ARG002 - the protocol's
        """Reject the request: this engine makes no embeddings."""
        raise bad_request(f"model {self.engine.model!r} makes no embeddings. {NO_EMBEDDINGS}", "unsupported_endpoint")
