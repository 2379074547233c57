"""The gateway: model calls on every surface, and ``GET /v1/models``. Every model call makes exactly one `Call`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from starlette.types import ASGIApp, Receive, Scope, Send

from lightning_spans.agents import selects
from lightning_spans.errors import StoreError
from lightning_trainer.server.answers import Record
from lightning_trainer.server.door import Door
from lightning_trainer.server.draft import Draft, begin
from lightning_trainer.server.keys import Grant
from lightning_trainer.server.metrics import Metrics
from lightning_trainer.server.outlet import Outlet
from lightning_trainer.server.refusals import Refusal, store_down
from lightning_trainer.server.settings import Limits, Routing
from lightning_trainer.server.surfaces.messages import MessagesSurface
from lightning_trainer.server.surfaces.surface import Surface
from lightning_trainer.server.wire import (
    ClientGoneError,
    headers,
    parse_object,
    read_body,
    send_bytes,
    send_json,
    unless_gone,
)
from lightning_trainer.server.writer import Writer

logger = logging.getLogger(__name__)
CLIENT_GONE = "client cut the connection"


class Policy(Protocol):
    """What answers calls for one model: the embedded engine or an upstream."""

    @property
    def max_model_len(self) -> int | None:
        """Most tokens of prompt and answer together; None where only the upstream knows."""
        ...

    async def answer(self, draft: Draft, outlet: Outlet, record: Record, routing: Routing) -> None:
        """Answer one request; see `EmbeddedEngine.answer`."""
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
        policies: Mapping[str, Policy],
        *,
        door: Door,
        writer: Writer,
        metrics: Metrics,
        limits: Limits,
        routing: Callable[[], Routing],
        provider: Policy | None = None,
        record_untrained: bool = True,
    ) -> None:
        self._policies = policies
        self._door = door
        self._writer = writer
        self._metrics = metrics
        self._limits = limits
        self._routing = routing
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
        await self._door.admit(scope, "attempt", "runner", "admin")
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
        await self._door.admit(scope, "attempt", "runner", "admin")
        name = scope["path"].removeprefix("/v1/models/")
        if name not in self._policies:
            raise _unknown(name, self._policies)
        await send_json(send, _model(name, self._policies[name]))

    def on(self, surface: Surface) -> ASGIApp:
        """Give the ASGI app that answers model calls on a surface."""

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            try:
                grant = await self._door.admit(scope, "attempt", "admin")
                body = parse_object(await read_body(scope, receive, self._limits.body_bytes))
            except Refusal as refusal:  # no good key, or no JSON object: such requests make no call
                await send_bytes(send, surface.refusal(refusal), status=refusal.status, extra=refusal.headers)
                return
            draft = begin(body, grant, headers(scope), str(body.get("model", "")), id_prefix=surface.id_prefix)
            await self._answer(surface, draft, receive, send)

        return app

    async def _answer(self, surface: Surface, draft: Draft, receive: Receive, send: Send) -> None:
        """Answer one model call and keep its record, whatever becomes of it."""
        task = asyncio.current_task()
        if task is not None:
            self._open.add(task)
            task.add_done_callback(self._open.discard)
        routing, kept = self._routing(), _Once(self._writer, self._metrics)
        outlet: Outlet | None = None
        try:
            exchange = surface.begin(draft.request, draft.grant.attempt_id)
            draft.request, draft.keeps_id = exchange.asked, exchange.keeps_id
            outlet = Outlet(send, exchange, draft)
            policy = self._policy(draft, draft.grant, routing)
            kept.keeps = policy is not self._provider or self._record_untrained
            with self._metrics.in_flight():
                await unless_gone(receive, policy.answer(draft, outlet, kept.record, routing))
        except ClientGoneError:
            await kept.failed(draft, CLIENT_GONE)
        except asyncio.CancelledError:
            kept.cancelled(draft)
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, it is recorded and told to the client
            refusal = await kept.refused(draft, error)
            if outlet is not None and outlet.started:
                await outlet.fail(refusal)
            else:
                await send_bytes(send, surface.refusal(refusal), status=refusal.status, extra=refusal.headers)

    async def count_tokens(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer ``POST /v1/messages/count_tokens``: nothing is drawn, so it makes no call."""
        surface = MessagesSurface()
        try:
            grant = await self._door.admit(scope, "attempt", "admin")
            body = parse_object(await read_body(scope, receive, self._limits.body_bytes))
            exchange = surface.begin({"max_tokens": 1, **body}, grant.attempt_id)
            draft = begin(body, grant, headers(scope), str(body.get("model", "")))
            number = await self._policy(draft, grant, self._routing()).count(exchange.asked)
        except Refusal as refusal:
            await send_bytes(send, surface.refusal(refusal), status=refusal.status, extra=refusal.headers)
            return
        await send_json(send, {"input_tokens": number})

    async def embeddings(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer ``POST /v1/embeddings`` with what the model's upstream answers; it makes no call.

        Raises:
            Refusal: no good key, no JSON object, or the model makes no embeddings.
        """
        grant = await self._door.admit(scope, "attempt", "admin")
        body = parse_object(await read_body(scope, receive, self._limits.body_bytes))
        draft = begin(body, grant, headers(scope), str(body.get("model", "")))
        policy = self._policy(draft, grant, self._routing())
        try:
            found = await unless_gone(receive, policy.embeddings(body))
        except ClientGoneError:
            return
        await send_bytes(send, found)

    def _policy(self, draft: Draft, grant: Grant, routing: Routing) -> Policy:
        if grant.attempt_id is not None:
            own = routing.policies.of(draft.agent)
            untrained = own is None and draft.agent is not None and not selects(routing.agents, draft.agent)
            if untrained and self._provider is not None:
                return self._provider
            if own is not None:
                draft.policy = own
            elif draft.policy not in self._policies:
                draft.policy = routing.model  # a program that was not changed asks for its usual model
        policy = self._policies.get(draft.policy)
        if policy is None:
            nameless = grant.attempt_id is not None and routing.policies.by_agent and draft.agent is None
            hint = ". This call names no agent: send x-lightning-agent, or ask for one of these" if nameless else ""
            raise _unknown(draft.policy, self._policies, hint)
        return policy


def _unknown(name: str, known: Iterable[str], hint: str = "") -> Refusal:
    listed = ", ".join(known) or "none"
    return Refusal(404, f"no model {name!r} here. Models: {listed}{hint}", code="model_not_found")


def _model(name: str, policy: Policy) -> dict[str, Any]:
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


class _Once:
    """Keeps the record of one request, once."""

    def __init__(self, writer: Writer, metrics: Metrics) -> None:
        self._writer = writer
        self._metrics = metrics
        self._begun = False
        self.keeps = True  # False: the call is answered and counted, and not kept

    async def record(self, draft: Draft, error: str | None = None) -> None:
        self._begun = True
        try:
            if self.keeps:
                await self._writer.call(draft.finish(error))
        except Exception as problem:
            raise store_down(problem) from problem
        self._metrics.call(draft, error)

    async def failed(self, draft: Draft, error: str) -> None:
        """Keep a call that failed, unless it is kept already; the client is not there to hear of a failing store."""
        if not self._begun:
            try:
                await self.record(draft, error)
            except Refusal as refusal:
                logger.error("a call of attempt %s was not recorded: %s", draft.grant.attempt_id, refusal)

    async def refused(self, draft: Draft, error: Exception) -> Refusal:
        """Keep a call that is refused or failed; give what the client is told."""
        if isinstance(error, StoreError):
            error = store_down(error)
        if not isinstance(error, Refusal):
            logger.exception("a call failed", exc_info=error)
            error = Refusal(500, f"the gateway failed: {type(error).__name__}: {error}", "server_error")
        if not self._begun:
            try:
                await self.record(draft, str(error))
            except Refusal as refusal:
                return refusal
        return error

    def cancelled(self, draft: Draft) -> None:
        """Keep a call that ends because the server stops."""
        if not self._begun:
            self._begun = True
            if self.keeps:
                self._writer.call_later(draft.finish("the server stopped"))
