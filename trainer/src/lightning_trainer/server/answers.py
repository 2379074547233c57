"""Answers to conversations from an engine that takes tokens: render, draw, record, reply."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from lightning_trainer.account import CONTINUATION
from lightning_trainer.engine import Engine, Sampled, Sampling
from lightning_trainer.server.answering import Answering
from lightning_trainer.server.ask import Ask
from lightning_trainer.server.chat import ChatFormat
from lightning_trainer.server.continuation import Continuations, Prompt
from lightning_trainer.server.draft import Draft
from lightning_trainer.server.faults import BrokenError
from lightning_trainer.server.outlet import Outlet
from lightning_trainer.server.refusals import Refusal, bad_request
from lightning_trainer.server.seeds import PromptCounter, seeds_of_choices
from lightning_trainer.server.settings import Routing

_Pieces: TypeAlias = AsyncGenerator[tuple[int, Sampled], None]  # each with its choice
Record: TypeAlias = Callable[[Draft], Awaitable[None]]  # returns when the call is on disk


@dataclass(frozen=True, slots=True)
class Ready:
    """What is asked for, its prompt as `Answers.prompt` made it, and what draws."""

    ask: Ask
    prompt: Prompt | None
    engine: Engine


class Answers:
    """Answers requests to one model. Not to be used by two threads at once.

    Args:
        tokenizer: the model's, chat template included.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.chat = ChatFormat(tokenizer)
        self.continuations = Continuations(self.chat)
        self.failure: str | None = None  # of the newest request, where the engine itself failed
        self._counter = PromptCounter()

    def forget(self, attempt_id: str) -> None:
        """Drop what is remembered of an attempt that has ended."""
        self.continuations.forget(attempt_id)
        self._counter.forget(attempt_id)

    def prompt(self, ask: Ask, attempt_id: str | None) -> Prompt | None:
        """Make the prompt of a conversation; None for a request that brings a prompt of its own.

        Raises:
            Refusal: the chat template has no place for tools, or refuses the conversation.
        """
        return self.continuations.prompt(ask.messages, ask.tools, attempt_id) if ask.messages else None

    async def draw(self, ready: Ready, draft: Draft, outlet: Outlet, record: Record, routing: Routing) -> None:
        """Draw what was asked for, keep it and send it.

        Args:
            ready: what to draw; the engine can do it.
            draft: see `EmbeddedEngine.answer`, also for the rest.
            outlet: where the answer goes.
            record: keeps the finished record.
            routing: as it stood when the request came.
        """
        ask, prompt, engine = ready.ask, ready.prompt, ready.engine
        ids = self._raw(ask) if prompt is None else prompt.ids
        draft.prompt_token_ids = ids
        if ask.max_tokens is None and routing.max_tokens is not None:
            ask = replace(ask, max_tokens=max(1, min(routing.max_tokens, engine.max_model_len - len(ids))))
        _check_room(ask, len(ids), engine.max_model_len)
        samplings = self._samplings(ask, draft, ids, routing)
        if prompt is not None:
            draft.sampling[CONTINUATION] = prompt.how
        answering = Answering(ask, draft, self.chat, outlet)
        try:
            async with aclosing(self._drawn(engine, ids, samplings)) as drawn:
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

    def _raw(self, ask: Ask) -> tuple[int, ...]:
        """Give the tokens of a prompt that is no conversation."""
        if isinstance(ask.prompt, str):
            return tuple(self._tokenizer.encode(ask.prompt))
        return tuple(ask.prompt or ())

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

    async def _drawn(self, engine: Engine, ids: Sequence[int], samplings: Sequence[Sampling]) -> _Pieces:
        draws = [engine.generate(ids, sampling) for sampling in samplings]
        try:
            async with aclosing(_numbered(draws[0]) if len(draws) == 1 else _together(draws)) as pieces:
                async for pair in pieces:
                    yield pair
        except (Refusal, BrokenError):
            raise
        except ValueError as error:
            raise bad_request(f"the engine refuses this: {error}", "context_length_exceeded") from error
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}"
            raise Refusal(500, f"the engine failed: {self.failure}", "server_error", "engine_failed") from error
        self.failure = None


def _check_room(ask: Ask, prompt: int, longest: int) -> None:
    if prompt + (ask.max_tokens or 1) > longest:
        raise bad_request(
            f"this model's context is {longest} tokens; the messages have {prompt} and the answer may have"
            f" {ask.max_tokens or 'at least 1'}. Shorten the messages or lower max_tokens.",
            "context_length_exceeded",
        )


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
