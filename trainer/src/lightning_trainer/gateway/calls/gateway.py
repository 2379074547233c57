"""The gateway: model calls on every surface, and ``GET /v1/models``. Every model call makes exactly one `Call`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from starlette.types import ASGIApp, Receive, Scope, Send

from lightning_spans.errors import StoreError
from lightning_spans.schema.agents import selects
from lightning_trainer.gateway.auth.access import Access
from lightning_trainer.gateway.auth.keys import Grant
from lightning_trainer.gateway.calls.answers import Record
from lightning_trainer.gateway.calls.response import ResponseSender
from lightning_trainer.gateway.http.asgi import ClientGoneError, headers, send_bytes, send_json, unless_gone
from lightning_trainer.gateway.http.errors import Refusal, store_down
from lightning_trainer.gateway.http.masking import masking_logger
from lightning_trainer.gateway.http.metrics import Metrics
from lightning_trainer.gateway.ingest.writer import RecordWriter
from lightning_trainer.gateway.intake.intake import Intake
from lightning_trainer.gateway.replay.answer import HEADER
from lightning_trainer.gateway.replay.decisions import Own
from lightning_trainer.gateway.replay.gate import ASKS, ReplayGate, ReplayStep, send_own
from lightning_trainer.gateway.request.pending import AGENT_HEADER, PendingCall, begin
from lightning_trainer.gateway.settings import Routing
from lightning_trainer.gateway.surfaces.messages import MessagesSurface
from lightning_trainer.gateway.surfaces.surface import Surface
from lightning_trainer.naming import agent_of

logger = masking_logger(__name__)
CLIENT_GONE = "client cut the connection"


class ServedModel(Protocol):
    """What answers calls for one model: the embedded engine or an upstream."""

    @property
    def max_model_len(self) -> int | None:
        """Most tokens of prompt and answer together; None where only the upstream knows."""
        ...

    async def answer(self, pending: PendingCall, sender: ResponseSender, record: Record, routing: Routing) -> None:
        """Answer one request; see `EmbeddedEngine.answer`."""
        ...

    def remember(self, pending: PendingCall) -> None:
        """Note a call that was answered from a record."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens; empty where it is not known."""
        ...

    async def count(self, request: Mapping[str, Any]) -> int:
        """Count the tokens of a request's prompt."""
        ...

    async def embeddings(self, body: Mapping[str, Any]) -> bytes:
        """Answer ``POST /v1/embeddings``."""
        ...


class Gateway:
    """Answers model calls and records them."""

    def __init__(
        self,
        policies: Mapping[str, ServedModel],
        *,
        access: Access,
        writer: RecordWriter,
        metrics: Metrics,
        intake: Intake,
        routing: Callable[[], Routing],
        replays: ReplayGate,
        provider: ServedModel | None = None,
        record_untrained: bool = True,
    ) -> None:
        self._policies = policies
        self._access = access
        self._writer = writer
        self._metrics = metrics
        self._intake = intake
        self._routing = routing
        self._replays = replays
        self._provider = provider
        self._record_untrained = record_untrained
        self._open: set[asyncio.Task[None]] = set()
        writer.expected = lambda: len(self._open)

    async def settle(self, timeout_s: float = 5.0) -> None:
        """Wait until every call that was begun has left its record; uvicorn only cancels them when it stops."""
        if self._open:
            await asyncio.wait(self._open, timeout=timeout_s)

    async def models(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - the ASGI signature
        """Answer ``GET /v1/models``: the names of the policies, as OpenAI's and Anthropic's clients read them."""
        await self._access.admit(scope, "attempt", "runner", "admin")
        data = [_model(name, policy) for name, policy in self._policies.items()]
        ends = (
            {"has_more": False, "first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"has_more": False}
        )
        await send_json(send, {"object": "list", "data": data, **ends})

    async def model(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - the ASGI signature
        """Answer ``GET /v1/models/NAME``.

        Raises:
            Refusal: there is no such model.
        """
        await self._access.admit(scope, "attempt", "runner", "admin")
        name = scope["path"].removeprefix("/v1/models/")
        if name not in self._policies:
            raise _unknown(name, self._policies)
        await send_json(send, _model(name, self._policies[name]))

    def on(self, surface: Surface) -> ASGIApp:
        """Return the ASGI app that answers model calls on a surface."""

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            try:
                grant = await self._access.admit(scope, "attempt", "admin")
                body = await self._intake.model_call(scope, receive, grant)
            except Refusal as refusal:  # no good key, or no JSON object: such requests make no call
                await send_bytes(send, surface.refusal(refusal), status=refusal.status, extra=refusal.headers)
                return
            given = headers(scope)
            pending = begin(body, grant, given, str(body.get("model", "")), id_prefix=surface.id_prefix)
            await self._answer(surface, pending, given, receive, send)

        app.__doc__ = type(surface).__doc__  # the docs list it
        return app

    async def _answer(
        self, surface: Surface, pending: PendingCall, sent: Mapping[bytes, bytes], receive: Receive, send: Send
    ) -> None:
        """Answer one model call and keep its record, whatever becomes of it; `sent` are its headers."""
        task = asyncio.current_task()
        if task is not None:
            self._open.add(task)
            task.add_done_callback(self._open.discard)
        routing, kept = self._routing(), _CallRecord(self._writer, self._metrics)
        sender: ResponseSender | None = None
        step: ReplayStep | None = None
        try:
            if pending.grant.replay:
                step = await self._replays.step(
                    surface,
                    pending,
                    asks=sent.get(HEADER.encode()) == ASKS,
                    name=lambda asked: _name(pending, asked, routing, sent),
                    sampled=lambda: self._samples(pending, routing),
                )
                if isinstance(step.decision, Own):
                    await send_own(send)
                    return
                if await step.send_as_it_was(pending, send, kept.record, surface.path):
                    return
            body = pending.request if step is None else step.body(pending.request)
            exchange = surface.begin(body, pending.grant.attempt_id)
            pending.request, pending.keeps_id = exchange.asked, exchange.keeps_id
            pending.left_out |= exchange.left_out
            pending.soft_limit = exchange.demands_limit
            _name(pending, pending.request, routing, sent)
            sender = ResponseSender(send, exchange, pending)
            if step is not None and not step.is_drawn:
                given = self._give(step, pending, sender, kept.record, routing)
                await (unless_gone(receive, given) if step.waits else given)
                return
            policy = self._policy(pending, pending.grant, routing, None if step is None else step.model)
            kept.keeps = policy is not self._provider or self._record_untrained
            with self._metrics.in_flight():
                await unless_gone(receive, policy.answer(pending, sender, kept.record, routing))
        except ClientGoneError:
            await kept.failed(pending, CLIENT_GONE)
        except asyncio.CancelledError:
            kept.cancelled(pending)
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, it is recorded and told to the client
            if step is not None:
                step.failed()
            refusal = await kept.refused(pending, error)
            if sender is not None and sender.started:
                await sender.fail(refusal)
            else:
                await send_bytes(send, surface.refusal(refusal), status=refusal.status, extra=refusal.headers)

    async def _give(
        self, step: ReplayStep, pending: PendingCall, sender: ResponseSender, record: Record, routing: Routing
    ) -> None:
        """Answer from the record, and let the policy that goes on know what was said."""
        try:
            policy: ServedModel | None = self._policy(pending, pending.grant, routing)
        except Refusal:  # nothing here answers for its agent
            policy = None
        await step.answer(pending, sender, record, policy)

    def _samples(self, pending: PendingCall, routing: Routing) -> bool:
        """Whether an agent's calls are answered here when nothing is replayed."""
        agent = pending.agent
        return self._provider is not None or routing.policies.of(agent) is not None or selects(routing.agents, agent)

    async def count_tokens(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer ``POST /v1/messages/count_tokens``: nothing is drawn, so it makes no call."""
        surface = MessagesSurface()
        try:
            grant = await self._access.admit(scope, "attempt", "admin")
            body = await self._intake.model_call(scope, receive, grant)
            exchange = surface.begin({"max_tokens": 1, **body}, grant.attempt_id)
            pending = begin(body, grant, headers(scope), str(body.get("model", "")))
            number = await self._policy(pending, grant, self._routing()).count(exchange.asked)
        except Refusal as refusal:
            await send_bytes(send, surface.refusal(refusal), status=refusal.status, extra=refusal.headers)
            return
        await send_json(send, {"input_tokens": number})

    async def embeddings(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer ``POST /v1/embeddings`` with what the model's upstream answers; it makes no call.

        Raises:
            Refusal: no good key, no JSON object, or the model makes no embeddings.
        """
        grant = await self._access.admit(scope, "attempt", "admin")
        body = await self._intake.model_call(scope, receive, grant)
        pending = begin(body, grant, headers(scope), str(body.get("model", "")))
        policy = self._policy(pending, grant, self._routing())
        try:
            found = await unless_gone(receive, policy.embeddings(body))
        except ClientGoneError:
            return
        await send_bytes(send, found)

    def _policy(self, pending: PendingCall, grant: Grant, routing: Routing, instead: str | None = None) -> ServedModel:
        if instead is not None:
            pending.policy = instead
        elif grant.attempt_id is not None:
            own = routing.policies.of(pending.agent)
            untrained = own is None and pending.agent is not None and not selects(routing.agents, pending.agent)
            if untrained and self._provider is not None:
                return self._provider
            if own is not None:
                pending.policy = own
            elif pending.policy not in self._policies:
                pending.policy = routing.model  # a program that was not changed asks for its usual model
        policy = self._policies.get(pending.policy)
        if policy is None:
            nameless = grant.attempt_id is not None and routing.policies.by_agent and pending.agent is None
            hint = ". This call names no agent: send x-lightning-agent, or ask for one of these" if nameless else ""
            raise _unknown(pending.policy, self._policies, hint)
        return policy


def _name(pending: PendingCall, asked: Mapping[str, Any], routing: Routing, sent: Mapping[bytes, bytes]) -> None:
    """Name the agent of a call by the rules, where its sender does not."""
    if AGENT_HEADER not in sent:
        pending.agent = agent_of(routing.name_by, asked, pending.policy, sent) or pending.agent


def _unknown(name: str, known: Iterable[str], hint: str = "") -> Refusal:
    listed = ", ".join(known) or "none"
    return Refusal(404, f"no model {name!r} here. Models: {listed}{hint}", code="model_not_found")


def _model(name: str, policy: ServedModel) -> dict[str, Any]:
    longest = policy.max_model_len
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "lightning",
        "type": "model",
        "display_name": name,
        "created_at": "1970-01-01T00:00:00Z",
        **({} if longest is None else {"max_model_len": longest}),  # vLLM's name for it
    }


class _CallRecord:
    """Keeps the record of one request, once."""

    def __init__(self, writer: RecordWriter, metrics: Metrics) -> None:
        self._writer = writer
        self._metrics = metrics
        self._begun = False
        self.keeps = True  # False: the call is answered and counted, and not kept

    async def record(self, pending: PendingCall, error: str | None = None) -> None:
        self._begun = True
        try:
            if self.keeps:
                await self._writer.call(pending.finish(error))
        except Exception as problem:
            raise store_down(problem) from problem
        self._metrics.call(pending, error)

    async def failed(self, pending: PendingCall, error: str) -> None:
        """Keep a call that failed, unless it is kept already; the client is not there to hear of a failing store."""
        if not self._begun:
            try:
                await self.record(pending, error)
            except Refusal as refusal:
                logger.error("a call of attempt %s was not recorded: %s", pending.grant.attempt_id, refusal)

    async def refused(self, pending: PendingCall, error: Exception) -> Refusal:
        """Keep a call that is refused or failed; give what the client is told."""
        if isinstance(error, StoreError):
            error = store_down(error)
        if not isinstance(error, Refusal):
            logger.exception("a call failed", exc_info=error)
            error = Refusal(500, f"the gateway failed: {type(error).__name__}: {error}", "server_error")
        if not self._begun:
            pending.sampling["error"] = {"status": error.status, "type": error.kind, "code": error.code}
            try:
                await self.record(pending, str(error))
            except Refusal as refusal:
                return refusal
        return error

    def cancelled(self, pending: PendingCall) -> None:
        """Keep a call that ends because the server stops."""
        if not self._begun:
            self._begun = True
            if self.keeps:
                self._writer.call_later(pending.finish("the server stopped"))
