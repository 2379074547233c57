"""Answers conversations with an engine that takes tokens: render, sample, record, reply."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

from lightning_spans.schema.json import dumps
from lightning_trainer.gateway.calls.generation import Generation
from lightning_trainer.gateway.calls.response import ResponseSender
from lightning_trainer.gateway.calls.seeds import PromptCounter, seeds_of_choices
from lightning_trainer.gateway.engine import (
    STEERED,
    Engine,
    SampledPiece,
    Sampling,
    abilities,
    mark_ended,
    marks_steered,
    measure_wait,
)
from lightning_trainer.gateway.http.errors import Refusal, bad_request
from lightning_trainer.gateway.prompt.continuation import Continuations, RenderedPrompt
from lightning_trainer.gateway.prompt.template import ChatFormat
from lightning_trainer.gateway.request.chat_request import ChatRequest, plainly, read_chat_request, without_unable
from lightning_trainer.gateway.request.pending import PendingCall
from lightning_trainer.gateway.settings import Routing
from lightning_trainer.models.merged_messages import MERGE
from lightning_trainer.reasons.call_errors import ENGINE_ENDED, ENGINE_WAIT, LONG_WAIT_S
from lightning_trainer.reasons.continuation import CONTINUATION

_TOKEN_BYTES: Final = 32  # no text has longer tokens on average, not even white space
_INLINE_BYTES: Final = 64 * 1024  # of messages; rendering and tokenizing these takes a few milliseconds
_EXCEEDED: Final = "context_length_exceeded"
_TOO_LONG: Final = "The prompt is too long: shorten the messages."  # programs for Anthropic's models look for this
_Pieces: TypeAlias = AsyncGenerator[tuple[int, SampledPiece], None]  # each with its choice
Record: TypeAlias = Callable[[PendingCall], Awaitable[None]]  # returns when the call is on disk


@dataclass(frozen=True, slots=True)
class Ready:
    """A request, its prompt as made by `Responder.prompt`, and the engine."""

    request: ChatRequest
    prompt: RenderedPrompt | None
    engine: Engine


class Responder:
    """Answers requests to one model. Must not be used by two threads at once.

    Args:
        tokenizer: the model's, including its chat template.
        tool_format: see `ChatFormat`.
    """

    def __init__(self, tokenizer: Any, tool_format: str | None = None) -> None:
        self._tokenizer = tokenizer
        self.chat = ChatFormat(tokenizer, tool_format)
        self.continuations = Continuations(self.chat)
        self.failure: str | None = None  # of the newest request, if the engine itself failed
        self._counter = PromptCounter()

    def forget(self, attempt_id: str) -> None:
        """Drop what is kept for an attempt that has ended."""
        self.continuations.forget(attempt_id)
        self._counter.forget(attempt_id)

    @property
    def writes_hermes(self) -> bool:
        """Whether the model writes tool calls in the format that servers assume."""
        return self.chat.calls is None or self.chat.calls.name == "hermes"

    def constrained(self, request: ChatRequest) -> ChatRequest:
        """Return a request with the grammar of its required answer, with calls in the model's own format.

        Raises:
            Refusal: a call cannot be forced in the model's format, or not with these schemas.
        """
        constraint, calls = request.constraint, self.chat.calls
        if constraint is None or not constraint.tools or calls is None or not self.chat.takes_tools:
            return request
        try:
            if (frame := self.chat.frame) is None:
                raise ValueError("the chat template does not show how to write it")
            return replace(request, others={**request.others, "grammar": constraint.lark(frame)})
        except ValueError as error:
            raise bad_request(
                f"a call can't be forced in the model's tool format, {calls.name}: {error}."
                " Leave out tool_choice, and response_format together with tools, and check the answer.",
                "unsupported_parameter",
            ) from None

    def prompt(self, request: ChatRequest, attempt_id: str | None) -> RenderedPrompt | None:
        """Render the prompt of a conversation; None for a request with its own prompt.

        Raises:
            Refusal: the chat template does not support tools, or rejects the conversation.
        """
        if not request.messages:
            return None
        prompt = self._prompt(request, attempt_id)
        if request.constraint is not None and self.chat.opened(prompt.text):
            raise bad_request(
                "the answer's form (response_format or tool_choice) can't be enforced, because the chat template begins"
                " the answer with reasoning. Turn reasoning off with reasoning_effort none, or leave the form out.",
                "unsupported_parameter",
            )
        return prompt

    def _prompt(self, request: ChatRequest, attempt_id: str | None) -> RenderedPrompt:
        return self.continuations.prompt(request.messages, request.tools, attempt_id, switches_of(request, self.chat))

    async def bounded_prompt(self, request: ChatRequest, attempt_id: str | None, longest: int) -> RenderedPrompt | None:
        """Render the prompt of a conversation, outside the event loop if it is large; see `prompt`.

        Raises:
            Refusal: also if it is larger than a context of `longest` tokens can be.
        """
        size = len(dumps([request.messages, request.tools])) if request.prompt is None else len(request.prompt)
        if size > _TOKEN_BYTES * longest:
            raise _context_refusal(longest, f"{size} bytes of messages are more than that holds", _TOO_LONG)
        if size <= _INLINE_BYTES:
            return self.prompt(request, attempt_id)
        return await asyncio.to_thread(self.prompt, request, attempt_id)

    async def draw(
        self, ready: Ready, pending: PendingCall, sender: ResponseSender, record: Record, routing: Routing
    ) -> None:
        """Sample what was requested, record it and send it.

        Args:
            ready: what to sample; the engine supports it.
            pending: see `EmbeddedEngine.answer`, also for the others.
            sender: where the answer is sent.
            record: keeps the finished record.
            routing: as it was when the request arrived.
        """
        request, prompt, engine = ready.request, ready.prompt, ready.engine
        ids = await asyncio.to_thread(self._raw, request) if prompt is None else prompt.ids
        pending.sample(prompt_token_ids=ids)
        if request.max_tokens is None and routing.max_tokens is not None:
            request = replace(request, max_tokens=max(1, min(routing.max_tokens, engine.max_model_len - len(ids))))
        room = engine.max_model_len - len(ids)
        if pending.requested.soft_limit and request.max_tokens is not None and request.max_tokens > room > 0:
            pending.sample(left_out={"max_tokens": request.max_tokens})
            request = replace(request, max_tokens=room)
        _check_room(request, len(ids), engine.max_model_len)
        samplings = self._samplings(request, pending, ids, routing, engine)
        if prompt is not None:
            pending.note(**{CONTINUATION: prompt.how})
            if switches := switches_of(request, self.chat):
                pending.note(template=dict(switches))
        if request.messages and self.chat.merges(request.messages):
            pending.note(system_messages=MERGE)
        pending.sample(left_out={**_unmet(request, self.chat), **pending.sampled.left_out})
        generation = Generation(request, pending, self.chat, sender, None if prompt is None else prompt.text)
        wait = measure_wait()
        try:
            async with aclosing(self._generate_pieces(engine, ids, samplings)) as drawn:
                async for index, piece in drawn:
                    await generation.take(index, piece)
        except BaseException:
            generation.cut()
            raise
        finally:
            if wait.seconds >= LONG_WAIT_S:
                pending.note(**{ENGINE_WAIT: round(wait.seconds, 3)})
            if wait.ended:
                pending.note(**{ENGINE_ENDED: True})
        generation.close()
        if pending.requested.grant.attempt_id is not None and prompt is not None:
            for choice in pending.sampled.choices:
                self.continuations.remember(
                    pending.requested.grant.attempt_id, prompt, choice.token_ids or (), choice.message
                )
        await record(pending)
        await generation.send()

    def remember(self, pending: PendingCall) -> None:
        """Note a call that was answered from a record, so that the attempt's next prompts continue its tokens."""
        attempt_id, ids = pending.requested.grant.attempt_id, pending.sampled.prompt_token_ids
        if attempt_id is None or ids is None or not pending.requested.request.get("messages"):
            return
        try:
            prompt = self.prompt(read_chat_request(pending.requested.request), attempt_id)
        except Refusal:  # another model's, which accepted what this one does not
            return
        if prompt is None or prompt.ids != ids:
            return
        for choice in pending.sampled.choices:
            if choice.token_ids:
                self.continuations.remember(attempt_id, prompt, choice.token_ids, choice.message)

    def _raw(self, request: ChatRequest) -> tuple[int, ...]:
        """Return the tokens of a prompt that is no conversation."""
        if isinstance(request.prompt, str):
            return tuple(self._tokenizer.encode(request.prompt))
        return tuple(request.prompt or ())

    def _samplings(
        self, request: ChatRequest, pending: PendingCall, ids: Sequence[int], routing: Routing, engine: Engine
    ) -> list[Sampling]:
        """Return the sampling parameters of each choice, and record them."""
        asked = 1.0 if request.temperature is None else request.temperature
        left_out: dict[str, Any] = {}
        own = routing.as_requested(pending.routed.policy)
        if routing.plain and pending.requested.grant.attempt_id is not None:
            request, left_out = plainly(request) if own.plain else without_unable(request, abilities(engine))
        routing = own
        sampling = Sampling(
            max_tokens=request.max_tokens,
            temperature=asked if routing.temperature is None else routing.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            stop=request.stop,
            **request.others,
        )
        seeds = seeds_of_choices(self._seed(request, pending, ids, routing), request.n)
        known: dict[str, Any] = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "max_tokens": sampling.max_tokens,
            "stop": list(sampling.stop),
            "n": request.n,
            "seeds": seeds,
            **request.others,
        }
        if routing.temperature is not None:
            known["temperature_asked"] = request.temperature
        if request.seed is not None:
            known["seed_asked"] = request.seed
        known |= {f"{name}_asked": value for name, value in left_out.items()}
        if (request.others or request.top_p < 1 or request.top_k) and marks_steered(engine, sampling):
            known[STEERED] = {}
        pending.sample(sampling=known)
        return [replace(sampling, seed=seed) for seed in seeds]

    def _seed(self, request: ChatRequest, pending: PendingCall, ids: Sequence[int], routing: Routing) -> int:
        grant = pending.requested.grant
        if pending.routed.seed is not None:
            return pending.routed.seed
        if routing.seed is None or grant.rollout_id is None or grant.attempt_id is None:
            return random.getrandbits(63) if request.seed is None else request.seed & (2**63 - 1)
        return self._counter.seed(
            routing.seed,
            grant.rollout_id,
            grant.attempt_id,
            pending.requested.agent,
            ids,
            failures=grant.failures,
            asked=request.seed,
        )

    async def _generate_pieces(self, engine: Engine, ids: Sequence[int], samplings: Sequence[Sampling]) -> _Pieces:
        draws = [engine.generate(ids, sampling) for sampling in samplings]
        try:
            async with aclosing(_number_pieces(draws[0]) if len(draws) == 1 else _together(draws)) as pieces:
                async for pair in pieces:
                    yield pair
        except Refusal:
            raise
        except ValueError as error:
            raise bad_request(f"the engine refuses this: {error}", "invalid_value") from error
        except Exception as error:
            mark_ended(0.0)  # such a failure ends all answers in progress, whichever request caused it
            self.failure = f"{type(error).__name__}: {error}"
            raise Refusal(500, f"the engine failed: {self.failure}", "server_error", "engine_failed") from error
        self.failure = None


def switches_of(request: ChatRequest, chat: ChatFormat) -> Mapping[str, Any]:
    """Return the variables that a request sets for the chat template: its own, and those for its reasoning effort.

    Raises:
        Refusal: the template does not know one of them, so that it would have no effect.
    """
    switches = dict(request.switches)
    unknown = sorted(name for name in switches if not chat.knows(name))
    if unknown:
        raise bad_request(
            f"chat_template_kwargs: the model's chat template does not look at {', '.join(unknown)}. Leave it out.",
            "unsupported_parameter",
        )
    effort, name = request.effort, chat.effort_switch
    if effort is None or name is None:
        return switches
    return {name: effort if name == "reasoning_effort" else effort not in ("none", "minimal"), **switches}


def _unmet(request: ChatRequest, chat: ChatFormat) -> dict[str, Any]:
    """Return the preferences of a request that the model has no way to follow."""
    met = chat.effort_switch is not None or (request.effort == "none" and not chat.thinks)
    unmet = {"verbosity": request.verbosity, "reasoning_effort": None if met else request.effort}
    return {name: value for name, value in unmet.items() if value is not None}


def _check_room(request: ChatRequest, prompt: int, longest: int) -> None:
    if prompt + (request.max_tokens or 1) > longest:
        asked = f"the messages have {prompt} and the answer may have {request.max_tokens or 'at least 1'}"
        advice = _TOO_LONG if prompt >= longest else "Shorten the messages or lower max_tokens."
        raise _context_refusal(longest, asked, advice)


def _context_refusal(longest: int, asked: str, advice: str) -> Refusal:
    """Return the refusal of a request that does not fit. Frameworks recognise it by OpenAI's words, or by its code."""
    message = f"This model's maximum context length is {longest} tokens. However, {asked} ({_EXCEEDED}). {advice}"
    return bad_request(message, _EXCEEDED)


async def _number_pieces(pieces: AsyncIterator[SampledPiece], index: int = 0) -> _Pieces:
    """Return the pieces with their choice. Closing this closes them, which cancels the request in the engine."""
    try:
        async for piece in pieces:
            yield index, piece
    finally:
        close = getattr(pieces, "aclose", None)  # the protocol requires only an iterator; generators have `aclose`
        if close is not None:
            await close()


async def _together(draws: Sequence[AsyncIterator[SampledPiece]]) -> _Pieces:
    """Sample several answers in parallel; return their pieces as they arrive. The first failure ends all of them."""
    ready: asyncio.Queue[tuple[int, SampledPiece] | Exception | None] = asyncio.Queue()

    async def pump(index: int, pieces: AsyncIterator[SampledPiece]) -> None:
        try:
            async with aclosing(_number_pieces(pieces, index)) as numbered:
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
