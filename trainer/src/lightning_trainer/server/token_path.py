"""Upstreams that are sent token ids: conversations are rendered and continued here, and their answers read here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from lightning_trainer import account as reasons
from lightning_trainer.engine import Sampled, Sampling
from lightning_trainer.server.answers import Answers, Ready, Record
from lightning_trainer.server.ask import check_abilities, read_ask
from lightning_trainer.server.connection import Connection
from lightning_trainer.server.constraints import Constraint, Form
from lightning_trainer.server.draft import Draft
from lightning_trainer.server.faults import BrokenError, failed, object_of
from lightning_trainer.server.outlet import Outlet
from lightning_trainer.server.refusals import Refusal
from lightning_trainer.server.replicas import Replica, Replicas
from lightning_trainer.server.settings import Routing
from lightning_trainer.server.sse import Events
from lightning_trainer.server.token_servers import TokenServer, form_of, token_server
from lightning_trainer.server.token_wires import Reader, WireError

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Way:
    """How an upstream is reached.

    Attributes:
        model: its name there.
        tokenizer: the model's.
        http: connections to its replicas.
        replicas: which it has.
        paused_s: most seconds that a call waits while it is paused.
        waits_for: what a wait for it is called.
        unwell: told of a replica that failed.
    """

    model: str
    tokenizer: Any
    http: Connection
    replicas: Replicas
    paused_s: float
    waits_for: str
    unwell: Callable[[Replica, BrokenError], None]


class TokenPath:
    """Answers the conversations that an upstream can be sent as token ids."""

    def __init__(self, way: Way) -> None:
        self._way = way
        self._answers = Answers(way.tokenizer)
        self._asking = asyncio.Lock()

    def forget(self, attempt_id: str) -> None:
        """Drop what is remembered of an attempt that has ended."""
        self._answers.forget(attempt_id)

    async def ready(self, draft: Draft, stamp: Callable[[], None]) -> Ready | str:
        """Make a request ready to be drawn; or say why the upstream must be sent its messages.

        Args:
            draft: the request.
            stamp: writes the version of the weights to the draft; called now and before each try.

        Raises:
            Refusal: no replica can be reached.
        """
        found = await self._first(draft.grant.attempt_id, self.server)
        stamp()
        if isinstance(found, str):
            return found
        try:
            ask = read_ask(draft.request)
            check_abilities(ask, found.wire.abilities)
            if ask.tools and not self._answers.chat.writes_hermes:
                return reasons.OTHER_CALLS
            prompt = self._answers.prompt(ask, draft.grant.attempt_id)
        except Refusal:  # the upstream may do it; what it can't, it refuses in its own words
            return reasons.ONLY_UPSTREAM_READS
        if ask.constraint is not None:
            if await self._first(draft.grant.attempt_id, self.form) == "none":
                return reasons.NO_FORM
            others = {name: value for name, value in ask.others.items() if name != "grammar"}
            ask = replace(ask, others=others)  # each replica is told it in its own form
        return Ready(ask, prompt, _OneCall(self, draft, found.context, stamp, ask.constraint))

    async def draw(self, ready: Ready, draft: Draft, outlet: Outlet, record: Record, routing: Routing) -> None:
        """Answer what `ready` gave; see `Answers.draw`."""
        await self._answers.draw(ready, draft, outlet, record, routing)

    def pass_by(self, draft: Draft) -> None:
        """Note a call that was sent as messages."""
        messages = draft.request.get("messages")
        if draft.grant.attempt_id is not None and isinstance(messages, list):
            for choice in draft.choices:
                self._answers.continuations.pass_by(draft.grant.attempt_id, messages, choice.message)

    async def _first(self, attempt_id: str | None, find: Callable[[Replica], Awaitable[_T]]) -> _T:
        """Find something out about the replica that the call goes to."""
        await self._way.replicas.may_go(self._way.paused_s)
        tried: list[Replica] = []
        while replica := self._way.replicas.choose(attempt_id, tried):
            try:
                return await find(replica)
            except BrokenError as error:
                tried.append(replica)
                self._way.unwell(replica, error)
                told = error.refusal
        raise told

    async def server(self, replica: Replica) -> TokenServer | str:
        """Say how a replica is sent token ids, or why it is sent messages; found out once."""
        if replica.tokens is None:
            async with self._asking:
                if replica.tokens is None:
                    way = self._way
                    found = token_server(way.http, replica, way.model, self._answers.chat, way.tokenizer)
                    replica.tokens = await found
        return replica.tokens

    async def form(self, replica: Replica) -> Form | Literal["none"]:
        """Say in which form a replica takes what an answer must be; found out once."""
        if replica.form is None:
            async with self._asking:
                if replica.form is None:
                    replica.form = await form_of(self._way.http, replica, self._way.model)
        return replica.form

    async def stream(
        self,
        replica: Replica,
        server: TokenServer,
        prompt: Sequence[int],
        sampling: Sampling,
        draft: Draft,
        *,
        constraint: Constraint | None,
    ) -> AsyncGenerator[Sampled, None]:
        """Draw one answer from a replica, as it comes.

        Raises:
            BrokenError: the replica can't be reached, or broke off.
            Refusal: its own, or its answer has no form that it should have.
            ValueError: the prompt leaves no room in the context.
        """
        http, room = self._way.http, server.context - len(prompt)
        if not prompt or room < 1:
            raise ValueError(f"a prompt of {len(prompt)} tokens leaves no room in a context of {server.context}")
        heated = replica.dialect != "lightning" and sampling.temperature not in {0.0, 1.0}
        if heated and await http.gives_raw_logprobs(replica, self._way.model):
            draft.sampling["logprobs_temperature"] = 1.0
        most, reader = min(room, sampling.max_tokens or room), server.wire.reader(prompt, sampling)
        streams = draft.request.get("stream") is True
        body = server.wire.body(self._way.model, prompt, most, sampling, stream=streams)
        if constraint is not None:
            form = await self.form(replica)
            if form == "none":
                raise BrokenError(failed(f"{replica.url} is not as the others: {reasons.NO_FORM}"))
            body["structured_outputs"] = draft.sampling["structured_outputs"] = constraint.structured_outputs(form)
        async with http.response(replica, server.wire.path, body) as response:
            if response.content_type != "text/event-stream":
                yield _read(reader, await http.read(response), replica)
                return
            events = Events()
            with http.arriving(response) as arriving:
                while piece := await arriving.piece():
                    for data in events.feed(piece):
                        if data != b"[DONE]":
                            yield _read(reader, data, replica)


class _OneCall:
    """An upstream as the engine of one call (see `Engine`). Each of its answers is a request of its own."""

    def __init__(
        self, path: TokenPath, draft: Draft, context: int, stamp: Callable[[], None], constraint: Constraint | None
    ) -> None:
        self._path, self._way, self._draft, self._stamp, self._constraint = path, path._way, draft, stamp, constraint
        self._begun = False  # whether anything of any of its answers came
        self.model, self.tokenizer, self.max_model_len = self._way.model, self._way.tokenizer, context

    @property
    def version(self) -> int:
        return self._draft.policy_version

    async def generate(self, prompt: Sequence[int], sampling: Sampling) -> AsyncGenerator[Sampled, None]:
        """Draw one answer. A replica that fails is left for another as long as nothing of the call was drawn."""
        replicas, tried, stale = self._way.replicas, list[Replica](), False
        while True:
            await replicas.may_go(self._way.paused_s)
            replica = replicas.choose(self._draft.grant.attempt_id, tried)
            if replica is None:  # a connection that was kept open too long says nothing of the server
                replica = tried.pop()
            self._stamp()
            try:
                async with aclosing(self._whole(replica, prompt, sampling)) as pieces:
                    async for piece in pieces:
                        self._begun = True
                        yield piece
                replica.failure = None
                return
            except BrokenError as error:
                tried.append(replica)
                self._way.unwell(replica, error)
                others = len(tried) < len(replicas.all)
                if self._begun or not (others or (error.stale and not stale)):
                    raise error.refusal from error
                stale = error.stale

    async def _whole(
        self, replica: Replica, prompt: Sequence[int], sampling: Sampling
    ) -> AsyncGenerator[Sampled, None]:
        """Give an answer to its end."""
        ended = False
        with self._way.replicas.at_work(replica):
            server = await self._path.server(replica)
            if isinstance(server, str):
                raise BrokenError(failed(f"{replica.url} is not as the others: {server}"))
            drawn = self._path.stream(replica, server, prompt, sampling, self._draft, constraint=self._constraint)
            async with aclosing(drawn) as pieces:
                async for piece in pieces:
                    ended = ended or piece.finish_reason is not None
                    if piece.token_ids or piece.text or piece.finish_reason is not None:
                        yield piece
        if not ended:
            raise BrokenError(failed(f"{replica.url} ended its answer before it was whole"))


def _read(reader: Reader, data: bytes, replica: Replica) -> Sampled:
    try:
        return reader.read(object_of(data)) or Sampled((), (), "")
    except WireError as error:
        raise failed(f"{replica.url} {error}") from None
    except (TypeError, AttributeError, KeyError, ValueError, IndexError) as error:
        raise failed(f"{replica.url} sent a reply of no known form: {type(error).__name__}: {error}") from None
