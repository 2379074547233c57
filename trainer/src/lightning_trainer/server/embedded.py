"""Calls answered by the embedded engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_trainer.engine import Engine, abilities
from lightning_trainer.server.answers import Answers, Ready, Record
from lightning_trainer.server.ask import check_abilities, read_ask
from lightning_trainer.server.continuation import Continuations
from lightning_trainer.server.draft import Draft
from lightning_trainer.server.outlet import Outlet
from lightning_trainer.server.refusals import bad_request
from lightning_trainer.server.settings import Routing


class EmbeddedEngine:
    """Answers chat completions with one engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._answers = Answers(engine.tokenizer)

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and answer together."""
        return self.engine.max_model_len

    @property
    def continuations(self) -> Continuations:
        """What is remembered of calls that were answered."""
        return self._answers.continuations

    @property
    def failure(self) -> str | None:
        """Why the newest request failed, where the engine itself did."""
        return self._answers.failure

    def forget(self, attempt_id: str) -> None:
        """Drop what is remembered of an attempt that has ended."""
        self._answers.forget(attempt_id)

    async def answer(self, draft: Draft, outlet: Outlet, record: Record, routing: Routing) -> None:
        """Answer one request.

        Args:
            draft: its record; the body has been read, nothing else.
            outlet: where the answer goes.
            record: keeps the finished record; called once, before the answer's last byte.
            routing: as it stood when the request came.

        Raises:
            Refusal: the request can't be done, or the engine failed; nothing was sent unless `outlet` has started.
        """
        ask = read_ask(draft.request)
        draft.policy_version = self.engine.version
        check_abilities(ask, abilities(self.engine))
        prompt = self._answers.prompt(ask, draft.grant.attempt_id)
        await self._answers.draw(Ready(ask, prompt, self.engine), draft, outlet, record, routing)

    async def count(self, request: Mapping[str, Any]) -> int:
        """Count the tokens of a request's prompt.

        Raises:
            Refusal: the request can't be done.
        """
        ask = read_ask(request)
        return len(self.continuations.prompt(ask.messages, ask.tools).ids)

    async def embeddings(self, body: Mapping[str, Any]) -> bytes:  # noqa: ARG002 - the protocol's
        """Refuse: this engine makes none."""
        raise bad_request(
            f"model {self.engine.model!r} makes no embeddings. Name a model of an upstream that does,"
            " such as --upstream MODEL=URL of `lightning-rl server`.",
            "unsupported_endpoint",
        )
