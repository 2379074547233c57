"""The app: everything of the training side that speaks HTTP, in one place."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import cast

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lightning_spans.errors import ConfigError, LeaseLostError, LightningError, StoreError
from lightning_spans.live import EVERYTHING, Live
from lightning_spans.store import Store
from lightning_trainer.engine import Engine
from lightning_trainer.server.api import router
from lightning_trainer.server.attempts import EndedAttempts
from lightning_trainer.server.control import Control
from lightning_trainer.server.door import Door
from lightning_trainer.server.embedded import EmbeddedEngine
from lightning_trainer.server.gateway import Gateway, Policy
from lightning_trainer.server.health import Health
from lightning_trainer.server.keys import Keys
from lightning_trainer.server.metrics import Metrics
from lightning_trainer.server.otlp import OtlpReceiver
from lightning_trainer.server.refusals import Refusal, bad_request, store_down, too_large
from lightning_trainer.server.settings import Limits, Routing
from lightning_trainer.server.surfaces.chat import ChatSurface
from lightning_trainer.server.surfaces.completions import CompletionsSurface
from lightning_trainer.server.surfaces.conversations import Conversations
from lightning_trainer.server.surfaces.messages import MessagesSurface
from lightning_trainer.server.surfaces.responses import ResponsesSurface
from lightning_trainer.server.surfaces.surface import Surface
from lightning_trainer.server.upstream import Upstream, UpstreamPolicy
from lightning_trainer.server.watched import WatchedEngine, watched_store
from lightning_trainer.server.wire import ClientGoneError, send_refusal
from lightning_trainer.server.writer import Writer

logger = logging.getLogger(__name__)


class App(FastAPI):
    """FastAPI, with the hot paths answered before it: its layers cost more than an answer does."""

    hot: Mapping[tuple[str, str], ASGIApp]
    metrics: Metrics
    limits: Limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await super().__call__(scope, receive, send)
            return
        path = scope["path"]
        counted = _Counted(send, self.metrics, path)
        known = "/v1/models/NAME" if path.startswith("/v1/models/") else path
        handler = self.hot.get((scope["method"], known))
        try:
            if handler is not None:
                await handler(scope, receive, counted)
            elif path.startswith("/v1/"):
                raise _not_served(scope["method"], path, self.hot)
            else:
                await super().__call__(scope, _limited(scope, receive, self.limits.body_bytes), counted)
        except ClientGoneError:
            return  # nobody is there to be answered
        except Exception as error:
            if counted.started:  # too late for another answer: the connection breaks off, which the client sees
                raise
            await send_refusal(counted, _refusal(error), path)


def _refusal(error: Exception) -> Refusal:
    if isinstance(error, Refusal):
        return error
    if isinstance(error, StoreError):
        return store_down(error)
    logger.exception("a request failed", exc_info=error)
    return Refusal(500, f"the server failed: {type(error).__name__}", "server_error")


def _not_served(method: str, path: str, hot: Mapping[tuple[str, str], ASGIApp]) -> Refusal:
    served = ", ".join(f"{verb} {place}" for verb, place in hot if place.startswith("/v1/"))
    status = 405 if any(place == path for _, place in hot) else 404
    return Refusal(status, f"{method} {path} is not served here. There are: {served}.", code="not_served")


class _Counted:
    """Sends what it is given, and counts the answer when it starts."""

    __slots__ = ("_metrics", "_path", "_send", "started")

    def __init__(self, send: Send, metrics: Metrics, path: str) -> None:
        self._send = send
        self._metrics = metrics
        self._path = path if path in _COUNTED else "/api" if path.startswith("/api/") else "other"
        self.started = False

    def __call__(self, message: Message) -> Awaitable[None]:  # no coroutine of its own: one more for each token
        if message["type"] == "http.response.start":
            self.started = True
            self._metrics.request(self._path, message["status"])
        return self._send(message)


_COUNTED = frozenset({
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens",
    "/v1/embeddings", "/v1/models", "/v1/traces", "/healthz", "/metrics",
})  # fmt: skip


def _limited(scope: Scope, receive: Receive, limit: int) -> Receive:
    """Count a body while it comes in; what is declared too large is refused before a byte is read."""
    declared = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
    if not declared.isdigit() or int(declared) > limit:
        raise too_large(limit)
    size = 0

    async def counting() -> Message:
        nonlocal size
        message = await receive()
        size += len(message.get("body", b""))
        if size > limit:  # FastAPI reads the body, and lets no other kind of exception through
            raise HTTPException(413, too_large(limit).message)
        return message

    return counting


def create_app(
    store: Store,
    *,
    keys: Keys,
    engine: Engine | Sequence[Engine] | None = None,
    upstreams: Sequence[Upstream] = (),
    routing: Routing | None = None,
    limits: Limits | None = None,
    live: Live = EVERYTHING,
    provider: Upstream | None = None,
    record_untrained: bool = True,
) -> App:
    """Make the app.

    Args:
        store: where everything is kept; the caller closes it, after the server has stopped.
        keys: issue and check what requests carry.
        engine: answers calls for `engine.model`; several each for theirs; None: only upstreams answer.
        upstreams: OpenAI-compatible servers, by the model they answer for.
        routing: what attempts are told; the training loop replaces it as ``app.state.routing``.
        limits: sizes and times.
        live: share and masking of the spans that come with a live key.
        provider: answers attempts' calls of agents that have a name and are none of ``routing.agents``, by the model
            they ask for; None: they are answered like the others.
        record_untrained: keep those calls, without tokens.

    Raises:
        ConfigError: two policies have one name.
    """
    limits = limits or Limits()
    engines = [] if engine is None else list(engine) if isinstance(engine, Sequence) else [engine]
    engines, store = [cast(Engine, WatchedEngine(each)) for each in engines], watched_store(store)
    routing = routing or Routing(model=engines[0].model if engines else "policy")
    metrics, writer = Metrics(), Writer(store, max_waiting_spans=limits.waiting_spans)
    attempts = EndedAttempts(store)
    door = Door(keys, attempts)
    embedded = [EmbeddedEngine(each) for each in engines]
    forwarding = [(upstream.model, UpstreamPolicy(upstream)) for upstream in upstreams]
    elsewhere = UpstreamPolicy(provider) if provider is not None else None
    policies = _by_name([*forwarding, *((each.engine.model, each) for each in embedded)])

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:  # noqa: ARG001 - FastAPI's signature
        yield
        await gateway.settle()
        for policy in [*(policy for _, policy in forwarding), *([elsewhere] if elsewhere is not None else [])]:
            await policy.close()
        await asyncio.to_thread(writer.close)

    app = App(title="Lightning", description="Rollouts, attempts, records.", lifespan=lifespan)
    app.metrics, app.limits = metrics, limits
    app.state.store, app.state.keys, app.state.door, app.state.metrics = store, keys, door, metrics
    app.state.attempts, app.state.limits, app.state.routing = attempts, limits, routing
    conversations = Conversations()
    app.state.forget = _forgetter(attempts, conversations, [*embedded, *(policy for _, policy in forwarding)])
    gateway = Gateway(
        policies,
        door=door,
        writer=writer,
        metrics=metrics,
        limits=limits,
        routing=lambda: app.state.routing,
        provider=elsewhere,
        record_untrained=record_untrained,
    )
    receiver = OtlpReceiver(door=door, writer=writer, metrics=metrics, limits=limits, live=live)
    health = Health(store, writer, embedded, [policy for _, policy in forwarding])
    surfaces: list[Surface] = [ChatSurface(), CompletionsSurface(), ResponsesSurface(conversations), MessagesSurface()]
    app.state.gateway = gateway
    control = Control([policy for _, policy in forwarding], door)
    app.hot = {
        **{("POST", surface.path): gateway.on(surface) for surface in surfaces},
        ("POST", "/v1/messages/count_tokens"): gateway.count_tokens,
        ("POST", "/v1/embeddings"): gateway.embeddings,
        ("GET", "/api/policies"): control.page,
        ("POST", "/api/policies/pause"): control.pause,
        ("POST", "/api/policies/resume"): control.resume,
        ("GET", "/v1/models"): gateway.models,
        ("GET", "/v1/models/NAME"): gateway.model,
        ("POST", "/v1/traces"): receiver.traces,
        ("GET", "/healthz"): health.page,
        ("GET", "/metrics"): metrics.page,
    }
    app.include_router(router)
    _answer_errors(app)
    return app


def _by_name(policies: Sequence[tuple[str, Policy]]) -> dict[str, Policy]:
    table = dict(policies)
    if len(table) < len(policies):
        listed = ", ".join(name for name, _ in policies)
        raise ConfigError(f"two policies have one name: {listed}. Give each --upstream a name of its own.")
    return table


def _forgetter(
    attempts: EndedAttempts, conversations: Conversations, policies: Sequence[EmbeddedEngine | UpstreamPolicy]
) -> Callable[[str], None]:
    def forget(attempt_id: str) -> None:
        attempts.ended(attempt_id)
        conversations.forget(attempt_id)
        for each in policies:
            each.forget(attempt_id)

    return forget


def _answer_errors(app: FastAPI) -> None:
    """Give every error of FastAPI's side in OpenAI's shape."""

    def told(refusal: Refusal) -> Response:
        return Response(refusal.body(), refusal.status, dict(refusal.headers), "application/json")

    @app.exception_handler(Refusal)
    async def refused(_: Request, error: Refusal) -> Response:
        return told(error)

    @app.exception_handler(LeaseLostError)
    async def lost(_: Request, error: LeaseLostError) -> Response:
        return told(Refusal(409, str(error), "conflict_error", "lease_lost"))

    @app.exception_handler(StoreError)
    async def down(_: Request, error: StoreError) -> Response:
        return told(store_down(error))

    @app.exception_handler(LightningError)
    async def wrong(_: Request, error: LightningError) -> Response:
        return told(bad_request(str(error)))

    @app.exception_handler(RequestValidationError)
    async def malformed(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        return told(bad_request(f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"))

    @app.exception_handler(HTTPException)
    async def http(_: Request, error: HTTPException) -> Response:
        kind = "invalid_request_error" if error.status_code < 500 else "server_error"
        return told(Refusal(error.status_code, str(error.detail), kind))
