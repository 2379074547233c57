"""Calls answered by the embedded engine: render, draw, record, reply."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, TypeAlias

from lightning_trainer.account import CONTINUATION
from lightning_trainer.engine import Engine, Sampled, Sampling, abilities
from lightning_trainer.server.answering import Answering
from lightning_trainer.server.ask import Ask, check_abilities, read_ask
from lightning_trainer.server.chat import ChatFormat
from lightning_trainer.server.continuation import Continuations
from lightning_trainer.server.draft import Draft
from lightning_trainer.server.outlet import Outlet
from lightning_trainer.server.refusals import Refusal, bad_request
from lightning_trainer.server.seeds import PromptCounter, seeds_of_choices
from lightning_trainer.server.settings import Routing

_Pieces: TypeAlias = AsyncGenerator[tuple[int, Sampled], None]  # each with its choice
Record: TypeAlias = Callable[[Draft], Awaitable[None]]  # returns when the call is on disk


class EmbeddedEngine:
    """Answers chat completions with one engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.chat = ChatFormat(engine.tokenizer)
        self.continuations = Continuations(self.chat)
        self.failure: str | None = None  # of the newest request, where the engine itself failed
        self._counter = PromptCounter()

    def forget(self, attempt_id: str) -> None:
        """Drop what is remembered of an attempt that has ended."""
        self.continuations.forget(attempt_id)
        self._counter.forget(attempt_id)

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
        prompt = self.continuations.prompt(ask.messages, ask.tools, draft.grant.attempt_id) if ask.messages else None
        ids = self._raw(ask) if prompt is None else prompt.ids
        draft.prompt_token_ids = ids
        if ask.max_tokens is None and routing.max_tokens is not None:
            ask = replace(ask, max_tokens=max(1, min(routing.max_tokens, self.engine.max_model_len - len(ids))))
        self._check_room(ask, len(ids))
        samplings = self._samplings(ask, draft, ids, routing)
        if prompt is not None:
            draft.sampling[CONTINUATION] = prompt.how
        answering = Answering(ask, draft, self.chat, outlet)
        try:
            async with aclosing(self._drawn(ids, samplings)) as drawn:
                async for index, piece in drawn:
                    await answering.take(index, piece)
        except BaseException:
            answering.cut()
            raise
        answering.close()
        if draft.grant.attempt_id is not None and prompt is not None:
            for choice in draft.choices:
                self.continuations.remember(draft.grant.attempt_id, prompt, choice.token_ids or (), choice.message)
        await record(draft)
        await answering.send()

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

    def _raw(self, ask: Ask) -> tuple[int, ...]:
        """Give the tokens of a prompt that is no conversation."""
        if isinstance(ask.prompt, str):
            return tuple(self.engine.tokenizer.encode(ask.prompt))
        return tuple(ask.prompt or ())

    def _check_room(self, ask: Ask, prompt: int) -> None:
        longest = self.engine.max_model_len
        if prompt + (ask.max_tokens or 1) > longest:
            raise bad_request(
                f"this model's context is {longest} tokens; the messages have {prompt} and the answer may have"
                f" {ask.max_tokens or 'at least 1'}. Shorten the messages or lower max_tokens.",
                "context_length_exceeded",
            )

    def _samplings(self, ask: Ask, draft: Draft, ids: Sequence[int], routing: Routing) -> list[Sampling]:
        """Say how each choice is drawn, and put it on record."""
        asked = 1.0 if ask.temperature is None else ask.temperature
        sampling = Sampling(
            max_tokens=ask.max_tokens,
            temperature=asked if routing.temperature is None else routing.temperature,
            top_p=ask.top_p,
            top_k=ask.top_k,
            stop=ask.stop,
            **ask.others,
        )
        seeds = seeds_of_choices(self._seed(ask, draft, ids, routing), ask.n)
        draft.sampling = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "max_tokens": sampling.max_tokens,
            "stop": list(sampling.stop),
            "n": ask.n,
            "seeds": seeds,
            **ask.others,
        }
        if routing.temperature is not None:
            draft.sampling["temperature_asked"] = ask.temperature
        return [replace(sampling, seed=seed) for seed in seeds]

    def _seed(self, ask: Ask, draft: Draft, ids: Sequence[int], routing: Routing) -> int:
        grant = draft.grant
        if ask.seed is not None:
            return ask.seed & (2**63 - 1)
        if routing.seed is None or grant.rollout_id is None or grant.attempt_id is None:
            return random.getrandbits(63)
        return self._counter.seed(routing.seed, grant.rollout_id, grant.attempt_id, draft.agent, ids)

    async def _drawn(self, ids: Sequence[int], samplings: Sequence[Sampling]) -> _Pieces:
        draws = [self.engine.generate(ids, sampling) for sampling in samplings]
        try:
            async with aclosing(_numbered(draws[0]) if len(draws) == 1 else _together(draws)) as pieces:
                async for pair in pieces:
                    yield pair
        except ValueError as error:
            raise bad_request(f"the engine refuses this: {error}", "context_length_exceeded") from error
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}"
            raise Refusal(500, f"the engine failed: {self.failure}", "server_error", "engine_failed") from error
        self.failure = None


async def _numbered(pieces: AsyncIterator[Sampled], index: int = 0) -> _Pieces:
    """Give the pieces with their choice; closing this closes them, which cancels the request in the engine."""
    try:
        async for piece in pieces:
            yield index, piece
    finally:
        close = getattr(pieces, "aclose", None)  # the protocol asks for an iterator; only generators have it
        if close is not None:
            await close()


async def _together(draws: Sequence[AsyncIterator[Sampled]]) -> _Pieces:
    """Draw several answers at once; give their pieces as they come. The first failure ends all of them."""
    ready: asyncio.Queue[tuple[int, Sampled] | Exception | None] = asyncio.Queue()

    async def pump(index: int, pieces: AsyncIterator[Sampled]) -> None:
        try:
            async with aclosing(_numbered(pieces, index)) as numbered:
                async for pair in numbered:
                    ready.put_nowait(pair)
            ready.put_nowait(None)
        except Exception as error:  # noqa: BLE001 - raised again by the reader below
            ready.put_nowait(error)

    tasks = [asyncio.ensure_future(pump(index, pieces)) for index, pieces in enumerate(draws)]
    try:
        going = len(tasks)
        while going:
            item = await ready.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                going -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
