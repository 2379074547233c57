"""The gateway: ``POST /v1/chat/completions`` and ``GET /v1/models``. Every request makes exactly one `Call`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Protocol

from starlette.types import Receive, Scope, Send

from lightning_spans.errors import StoreError
from lightning_trainer.server.door import Door
from lightning_trainer.server.draft import Draft, begin
from lightning_trainer.server.embedded import Record
from lightning_trainer.server.keys import Grant
from lightning_trainer.server.metrics import Metrics
from lightning_trainer.server.refusals import Refusal, store_down
from lightning_trainer.server.settings import Limits, Routing
from lightning_trainer.server.sse import EventStream
from lightning_trainer.server.wire import (
    ClientGoneError,
    headers,
    parse_object,
    read_body,
    send_json,
    send_refusal,
    unless_gone,
)
from lightning_trainer.server.writer import Writer

logger = logging.getLogger(__name__)
CLIENT_GONE = "client cut the connection"


class Policy(Protocol):
    """What answers calls for one model: the embedded engine or an upstream."""

    async def answer(self, draft: Draft, events: EventStream, send: Send, record: Record, routing: Routing) -> None:
        """Answer one request; see `EmbeddedEngine.answer`."""
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
    ) -> None:
        self._policies = policies
        self._door = door
        self._writer = writer
        self._metrics = metrics
        self._limits = limits
        self._routing = routing
        self._open: set[asyncio.Task[None]] = set()

    async def settle(self, timeout_s: float = 5.0) -> None:
        """Wait until every call that was begun has left its record; uvicorn only cancels them when it stops."""
        if self._open:
            await asyncio.wait(self._open, timeout=timeout_s)

    async def models(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - the ASGI signature
        """Answer ``GET /v1/models``: the names of the policies."""
        await self._door.admit(scope, "attempt", "runner", "admin")
        data = [{"id": name, "object": "model", "created": 0, "owned_by": "lightning"} for name in self._policies]
        await send_json(send, {"object": "list", "data": data})

    async def chat_completions(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer ``POST /v1/chat/completions``.

        Raises:
            Refusal: no good key, or no JSON object; such requests make no call.
        """
        grant = await self._door.admit(scope, "attempt", "admin")
        request = parse_object(await read_body(scope, receive, self._limits.body_bytes))
        routing = self._routing()
        draft = begin(request, grant, headers(scope), str(request.get("model", "")))
        task = asyncio.current_task()
        if task is not None:
            self._open.add(task)
            task.add_done_callback(self._open.discard)
        events = EventStream(send)
        kept = _Once(self._writer, self._metrics)
        try:
            policy = self._policy(draft, grant, routing)
            with self._metrics.in_flight():
                await unless_gone(receive, policy.answer(draft, events, send, kept.record, routing))
        except ClientGoneError:
            await kept.failed(draft, CLIENT_GONE)
        except asyncio.CancelledError:
            kept.cancelled(draft)
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, it is recorded and told to the client
            await _tell(await kept.refused(draft, error), events, send)

    def _policy(self, draft: Draft, grant: Grant, routing: Routing) -> Policy:
        if grant.attempt_id is not None:
            own = routing.policies.of(draft.agent)
            if own is not None:
                draft.policy = own
            elif draft.policy not in self._policies:
                draft.policy = routing.model  # a program that was not changed asks for its usual model
        policy = self._policies.get(draft.policy)
        if policy is None:
            known = ", ".join(self._policies) or "none"
            nameless = grant.attempt_id is not None and routing.policies.by_agent and draft.agent is None
            hint = ". This call names no agent: send x-lightning-agent, or ask for one of these" if nameless else ""
            raise Refusal(404, f"no model {draft.policy!r} here. Models: {known}{hint}", code="model_not_found")
        return policy


class _Once:
    """Keeps the record of one request, once."""

    def __init__(self, writer: Writer, metrics: Metrics) -> None:
        self._writer = writer
        self._metrics = metrics
        self._begun = False

    async def record(self, draft: Draft, error: str | None = None) -> None:
        self._begun = True
        try:
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
            self._writer.call_later(draft.finish("the server stopped"))


async def _tell(refusal: Refusal, events: EventStream, send: Send) -> None:
    if events.started:
        await events.fail(refusal.body())
    else:
        await send_refusal(send, refusal)
