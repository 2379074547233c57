"""Upstreams that are sent token ids: conversations are rendered and continued here, and their answers parsed here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from lightning_spans.chat.stream import EventReader
from lightning_trainer.gateway.calls.answers import Ready, Record, Responder
from lightning_trainer.gateway.calls.response import ResponseSender
from lightning_trainer.gateway.engine import SampledPiece, Sampling
from lightning_trainer.gateway.formats.frames import HERMES
from lightning_trainer.gateway.http.errors import Refusal
from lightning_trainer.gateway.request.chat_request import check_abilities, read_chat_request
from lightning_trainer.gateway.request.constraints import Constraint, Form
from lightning_trainer.gateway.request.pending import PendingCall
from lightning_trainer.gateway.settings import Routing
from lightning_trainer.gateway.upstream.connection import Connection
from lightning_trainer.gateway.upstream.ending import down_note
from lightning_trainer.gateway.upstream.errors import BrokenError, events_of, object_of, upstream_failure
from lightning_trainer.gateway.upstream.replicas import Replica, Replicas
from lightning_trainer.gateway.upstream.served_names import ServedNames
from lightning_trainer.gateway.upstream.token_protocols import Reader, TokenProtocolError, TokenServer
from lightning_trainer.gateway.upstream.token_servers import form_of, token_server
from lightning_trainer.reasons.continuation import ContinuationReason

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Route:
    """How an upstream is reached.

    Attributes:
        model: the model's name in this server.
        names: the model's names at the upstream.
        tokenizer: the model's.
        http: connections to its replicas.
        replicas: its replicas.
        paused_s: most seconds that a call waits while it is paused.
        waits_for: what a call that waits for it is shown to wait for.
        unwell: called for a replica that failed.
        tool_format: see `ChatFormat`.
    """

    model: str
    names: ServedNames
    tokenizer: Any
    http: Connection
    replicas: Replicas
    paused_s: float
    waits_for: str
    unwell: Callable[[Replica, BrokenError], None]
    tool_format: str | None = None


class TokenPath:
    """Answers the conversations that can be sent to an upstream as token ids."""

    def __init__(self, route: Route) -> None:
        self._route = route
        self._answers = Responder(route.tokenizer, route.tool_format)
        self._asking = asyncio.Lock()

    def forget(self, attempt_id: str) -> None:
        """Drop what is kept for an attempt that has ended."""
        self._answers.forget(attempt_id)

    def remember(self, pending: PendingCall) -> None:
        """Note a call that was answered from a record; see `Responder.remember`."""
        self._answers.remember(pending)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens."""
        return self._answers.chat.decode(ids)

    async def ready(self, pending: PendingCall, stamp: Callable[[], None]) -> Ready | str:
        """Prepare a request for sampling; or return why the upstream must be sent its messages.

        Args:
            pending: the request.
            stamp: writes the version of the weights to the pending call; called now and before each try.

        Raises:
            Refusal: no replica can be reached.
        """
        found = await self._first(pending, self.server)
        stamp()
        if isinstance(found, str):
            return found
        try:
            request = read_chat_request(pending.requested.request)
            check_abilities(request, found.protocol.abilities)
            if request.tools and self._answers.chat.takes_tools and self._answers.chat.calls is None:
                return ContinuationReason.OTHER_CALLS
            if request.constraint is not None and request.constraint.tools and not self._answers.writes_hermes:
                return ContinuationReason.ONLY_UPSTREAM_READS
            prompt = await self._answers.bounded_prompt(request, pending.requested.grant.attempt_id, found.context)
        except Refusal:  # the upstream may support it; otherwise it rejects it with its own message
            return ContinuationReason.ONLY_UPSTREAM_READS
        if request.constraint is not None:
            if await self._first(pending, self.form) == "none":
                return ContinuationReason.NO_FORM
            others = {name: value for name, value in request.others.items() if name != "grammar"}
            request = replace(request, others=others)  # each replica gets it in its own format
        return Ready(request, prompt, _OneCall(self, pending, found.context, stamp, request.constraint))

    async def draw(
        self, ready: Ready, pending: PendingCall, sender: ResponseSender, record: Record, routing: Routing
    ) -> None:
        """Answer what `ready` returned; see `Responder.draw`."""
        await self._answers.draw(ready, pending, sender, record, routing)

    def pass_by(self, pending: PendingCall) -> None:
        """Note a call that was sent as messages."""
        messages = pending.requested.request.get("messages")
        if pending.requested.grant.attempt_id is not None and isinstance(messages, list):
            for choice in pending.sampled.choices:
                self._answers.continuations.pass_by(pending.requested.grant.attempt_id, messages, choice.message)

    async def _first(self, pending: PendingCall, find: Callable[[Replica], Awaitable[_T]]) -> _T:
        """Detect a property of the replica that the call uses."""
        await self._route.replicas.may_go(self._route.paused_s)
        tried: list[Replica] = []
        while replica := self._route.replicas.choose(pending.requested.grant.attempt_id, tried):
            try:
                return await find(replica)
            except BrokenError as error:
                tried.append(replica)
                self._route.unwell(replica, error)
                last = error
        pending.note(**await down_note(last, self._route.http, tried[-1], pending))
        raise last.refusal

    async def server(self, replica: Replica) -> TokenServer | str:
        """Return how a replica is sent token ids, or why it is sent messages; detected once."""
        if replica.tokens is None:
            async with self._asking:
                if replica.tokens is None:
                    route = self._route
                    with route.names.call() as served:
                        found = token_server(route.http, replica, served.name, self._answers.chat, route.tokenizer)
                        replica.tokens = await found
        return replica.tokens

    async def form(self, replica: Replica) -> Form | Literal["none"]:
        """Return a replica's format for an answer's required form; detected once."""
        if replica.form is None:
            async with self._asking:
                if replica.form is None:
                    with self._route.names.call() as served:
                        replica.form = await form_of(self._route.http, replica, served.name)
        return replica.form

    async def stream(
        self,
        replica: Replica,
        server: TokenServer,
        prompt: Sequence[int],
        sampling: Sampling,
        pending: PendingCall,
        *,
        served: str,
        constraint: Constraint | None,
    ) -> AsyncGenerator[SampledPiece, None]:
        """Sample one answer from a replica, as it arrives.

        Raises:
            BrokenError: the replica cannot be reached, or the connection broke.
            Refusal: its own error, or its answer is malformed.
            ValueError: the prompt leaves no room in the context.
        """
        http, room = self._route.http, server.context - len(prompt)
        if not prompt or room < 1:
            raise ValueError(f"a prompt of {len(prompt)} tokens leaves no room in a context of {server.context}")
        heated = sampling.temperature not in {0.0, 1.0}
        if heated and await http.gives_raw_logprobs(replica, served):
            pending.note(logprobs_temperature=1.0)
        most, reader = min(room, sampling.max_tokens or room), server.protocol.reader(prompt, sampling)
        streams = pending.requested.request.get("stream") is True
        body = server.protocol.body(served, prompt, most, sampling, stream=streams)
        if constraint is not None:
            form = await self.form(replica)
            if form == "none":
                raise BrokenError(
                    upstream_failure(f"{replica.url} differs from the other replicas: {ContinuationReason.NO_FORM}")
                )
            told = constraint.structured_outputs(form, self._answers.chat.frame or HERMES)
            body["structured_outputs"] = told
            pending.note(structured_outputs=told)
        async with http.response(replica, server.protocol.path, body) as response:
            if response.content_type != "text/event-stream":
                yield _read(reader, await http.read(response), replica)
                return
            events = EventReader()
            with http.arriving(response) as arriving:
                while piece := await arriving.piece():
                    for data in events_of(events, piece):
                        yield _read(reader, data, replica)


class _OneCall:
    """An upstream as the engine of one call (see `Engine`). Each of its answers is a request of its own."""

    def __init__(
        self,
        path: TokenPath,
        pending: PendingCall,
        context: int,
        stamp: Callable[[], None],
        constraint: Constraint | None,
    ) -> None:
        self._path, self._route, self._pending, self._stamp, self._constraint = (
            path,
            path._route,
            pending,
            stamp,
            constraint,
        )
        self._begun = False  # whether anything of any of its answers has arrived
        self.model, self.tokenizer, self.max_model_len = self._route.model, self._route.tokenizer, context

    @property
    def version(self) -> int:
        return self._pending.sampled.policy_version

    async def generate(self, prompt: Sequence[int], sampling: Sampling) -> AsyncGenerator[SampledPiece, None]:
        """Sample one answer. If a replica fails before anything of the call was sampled, another is used."""
        replicas, tried, stale = self._route.replicas, list[Replica](), False
        while True:
            await replicas.may_go(self._route.paused_s)
            replica = replicas.choose(self._pending.requested.grant.attempt_id, tried)
            if replica is None:  # a connection that was kept open too long says nothing about the server
                replica = tried.pop()
            self._stamp()
            try:
                async with aclosing(self._whole(replica, prompt, sampling)) as pieces:
                    async for piece in pieces:
                        self._begun = True
                        yield piece
                replicas.recover(replica)
                return
            except BrokenError as error:
                tried.append(replica)
                self._route.unwell(replica, error)
                others = len(tried) < len(replicas.all)
                if self._begun or not (others or (error.stale and not stale)):
                    self._pending.note(**await down_note(error, self._route.http, replica, self._pending))
                    raise error.refusal from error
                stale = error.stale
            except Refusal as refusal:
                self._pending.note(**await down_note(refusal, self._route.http, replica, self._pending))
                raise

    async def _whole(
        self, replica: Replica, prompt: Sequence[int], sampling: Sampling
    ) -> AsyncGenerator[SampledPiece, None]:
        """Return an answer to its end."""
        ended = False
        with self._route.replicas.answering(replica), self._route.names.call() as served:
            server = await self._path.server(replica)
            if isinstance(server, str):
                raise BrokenError(upstream_failure(f"{replica.url} differs from the other replicas: {server}"))
            drawn = self._path.stream(
                replica, server, prompt, sampling, self._pending, served=served.name, constraint=self._constraint
            )
            async with aclosing(drawn) as pieces:
                async for piece in pieces:
                    ended = ended or piece.finish_reason is not None
                    if piece.token_ids or piece.text or piece.finish_reason is not None:
                        yield piece
        if not ended:
            raise BrokenError(upstream_failure(f"{replica.url} ended its answer before it was complete"))


def _read(reader: Reader, data: bytes, replica: Replica) -> SampledPiece:
    try:
        return reader.read(object_of(data)) or SampledPiece((), (), "")
    except TokenProtocolError as error:
        raise upstream_failure(f"{replica.url} {error}") from None
    except (TypeError, AttributeError, KeyError, ValueError, IndexError) as error:
        raise upstream_failure(
            f"{replica.url} sent a reply of an unknown form: {type(error).__name__}: {error}"
        ) from None
