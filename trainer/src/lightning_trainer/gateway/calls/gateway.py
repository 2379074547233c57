"""The gateway: model calls on every surface, and ``GET /v1/models``. Every model call creates exactly one `Call`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from lightning_spans.record.production import Live
from lightning_trainer.gateway.auth.access import Access
from lightning_trainer.gateway.calls.incoming import Decider, IncomingCall, name_agent
from lightning_trainer.gateway.calls.models import ServedModels
from lightning_trainer.gateway.calls.recording import CallRecord
from lightning_trainer.gateway.http.asgi import ClientGoneError, headers, run_unless_gone, send_bytes, send_json
from lightning_trainer.gateway.http.errors import Refusal, unauthorized
from lightning_trainer.gateway.http.metrics import Metrics
from lightning_trainer.gateway.ingest.writer import RecordWriter
from lightning_trainer.gateway.intake.intake import Intake
from lightning_trainer.gateway.request.pending import PendingCall, begin
from lightning_trainer.gateway.settings import Routing
from lightning_trainer.gateway.surfaces.messages import MessagesSurface
from lightning_trainer.gateway.surfaces.messages_request import chat_of_messages
from lightning_trainer.gateway.surfaces.surface import Surface
from lightning_trainer.reasons.call_errors import ATTEMPT_ENDED, CLIENT_GONE

_CUT_S: Final = 10.0  # for the records of calls that are cut off
_GIVEN_UP_S: Final = 5.0  # for the records of calls that a program gave up, which may also go on


class Gateway:
    """Answers model calls and records them."""

    def __init__(
        self,
        models: ServedModels,
        *,
        access: Access,
        writer: RecordWriter,
        metrics: Metrics,
        intake: Intake,
        routing: Callable[[], Routing],
        live: Live,
    ) -> None:
        self._models = models
        self._live = live
        self._access = access
        self._writer = writer
        self._metrics = metrics
        self._intake = intake
        self._routing = routing
        self._deciders: list[Decider] = []
        self._at_end: list[Callable[[], Awaitable[None]]] = []
        self._open: dict[asyncio.Task[None], CallRecord] = {}
        self._cut: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        writer.expected = lambda: len(self._open)

    def register(self, decider: Decider) -> None:
        """Register a decider, which handles calls before a policy answers them.

        The first that takes a call handles it.
        """
        self._deciders.append(decider)

    def end_with(self, work: Callable[[], Awaitable[None]]) -> None:
        """Run this when the server stops, before the models' connections are closed."""
        self._at_end.append(work)

    async def settle(self, timeout_s: float = 5.0) -> None:
        """Wait until every call that began has been recorded; uvicorn only cancels them when it stops."""
        if self._open:
            await asyncio.wait(self._open, timeout=timeout_s)
        for work in self._at_end:
            await work()

    def end_calls(self, attempts: Mapping[str, bool]) -> None:
        """Wait for the records of the calls of attempts that end. Must not be called on the event loop.

        Args:
            attempts: ids of attempts, and whether their running calls are cut off, because nobody waits for the answers
                any more. Their records have the tokens sampled so far, which tell whether the policy contributed to a
                failure. Calls of an attempt that succeeded may be meant to outlive it, so they go on.
        """
        if self._loop is not None and any(record.attempt_id in attempts for record in list(self._open.values())):
            asyncio.run_coroutine_threadsafe(self._end_calls(attempts), self._loop).result()

    async def _end_calls(self, attempts: Mapping[str, bool]) -> None:
        """Cut calls off once, and wait for their records also if the end of the attempt is reported again.

        A call whose record is being written, such as one whose client is gone, is not cut: it would end before that.
        """
        records = {task: record for task, record in self._open.items() if record.attempt_id in attempts}
        cut = {task for task, record in records.items() if attempts[record.attempt_id or ""]}
        running = {task for task in cut if not records[task].begun}
        for task in running - self._cut:
            task.cancel()
        self._cut.update(running)
        waits = ((cut, _CUT_S), (records.keys() - cut, _GIVEN_UP_S))
        await asyncio.gather(*(asyncio.wait(tasks, timeout=limit_s) for tasks, limit_s in waits if tasks))

    def _forget_task(self, task: asyncio.Task[None]) -> None:
        self._open.pop(task, None)
        self._cut.discard(task)

    async def models(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - the ASGI signature
        """Answer ``GET /v1/models``: the names of the policies, in a format for OpenAI's and Anthropic's clients."""
        await self._access.admit(scope, "attempt", "runner", "caller", "admin")
        data = self._models.describe()
        ends = (
            {"has_more": False, "first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"has_more": False}
        )
        await send_json(send, {"object": "list", "data": data, **ends})

    async def model(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - the ASGI signature
        """Answer ``GET /v1/models/NAME``.

        Raises:
            Refusal: there is no such model.
        """
        await self._access.admit(scope, "attempt", "runner", "caller", "admin")
        await send_json(send, self._models.describe_one(scope["path"].removeprefix("/v1/models/")))

    def on(self, surface: Surface) -> ASGIApp:
        """Return the ASGI app that answers model calls on a surface."""

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            try:
                grant = await self._access.admit(scope, "attempt", "caller", "admin")
                body = await self._intake.model_call(scope, receive, grant)
            except Refusal as refusal:  # no valid key, or not a JSON object: such requests create no call
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
        """Answer one model call and record it, whatever its outcome; `sent` are its headers."""
        kept = CallRecord(self._writer, self._metrics, pending.requested.grant.attempt_id, self._live)
        task = asyncio.current_task()
        if task is not None:
            self._loop = asyncio.get_running_loop()
            self._open[task] = kept
            task.add_done_callback(self._forget_task)
        call = IncomingCall(surface, pending, sent, self._routing(), self._models, kept, self._metrics, receive, send)
        decider = next((decider for decider in self._deciders if decider.takes(pending.requested.grant)), None)
        try:
            await (call.sample() if decider is None else decider.answer(call))
        except ClientGoneError:
            try:
                await kept.cut(pending, CLIENT_GONE)
            except asyncio.CancelledError:
                if task not in self._cut:  # otherwise the attempt has ended as well; the record is written in any case
                    raise
        except asyncio.CancelledError:
            if task not in self._cut or task.uncancel():  # more than once: the server is stopping too
                kept.cancelled(pending)
                raise
            await kept.cut(pending, ATTEMPT_ENDED)
            await _send_error(call, unauthorized(ATTEMPT_ENDED))
        except Exception as error:  # noqa: BLE001 - whatever it is, it is recorded and told to the client
            await _send_error(call, await kept.refused(pending, error))

    async def count_tokens(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer ``POST /v1/messages/count_tokens``. Nothing is sampled, so it creates no call."""
        surface = MessagesSurface()
        try:
            grant = await self._access.admit(scope, "attempt", "caller", "admin")
            body = await self._intake.model_call(scope, receive, grant)
            asked, _ = chat_of_messages({"max_tokens": 1, **body})
            given, routing = headers(scope), self._routing()
            pending = begin(body, grant, given, str(body.get("model", "")))
            name_agent(pending, asked, given, routing)
            number = await self._models.route(pending, routing).count(asked)
        except Refusal as refusal:
            await send_bytes(send, surface.refusal(refusal), status=refusal.status, extra=refusal.headers)
            return
        await send_json(send, {"input_tokens": number})

    async def embeddings(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer ``POST /v1/embeddings`` with the response of the requested model's upstream. It creates no call.

        Raises:
            Refusal: no valid key, not a JSON object, or no such model makes embeddings.
        """
        grant = await self._access.admit(scope, "attempt", "caller", "admin")
        body = await self._intake.model_call(scope, receive, grant)
        model = self._models.embedder(str(body.get("model", "")), of_attempt=grant.attempt_id is not None)
        try:
            found = await run_unless_gone(receive, model.embeddings(body))
        except ClientGoneError:
            return
        await send_bytes(send, found)


async def _send_error(call: IncomingCall, refusal: Refusal) -> None:
    """Send an error to the client, within the stream if one has begun."""
    if call.sender is not None and call.sender.started:
        await call.sender.fail(refusal)
    else:
        await send_bytes(call.send, call.surface.refusal(refusal), status=refusal.status, extra=refusal.headers)
