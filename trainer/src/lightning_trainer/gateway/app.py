"""The app: everything of the training side that speaks HTTP, in one place."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import cast

import orjson
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lightning_spans.errors import ConfigError, LeaseLostError, LightningError, StoreError
from lightning_spans.record.production import EVERYTHING, Live
from lightning_spans.store import Store
from lightning_trainer.gateway.api.routes import router
from lightning_trainer.gateway.auth.access import Access
from lightning_trainer.gateway.auth.ended_attempts import EndedAttempts
from lightning_trainer.gateway.auth.keys import Keys
from lightning_trainer.gateway.auth.leases import Leases
from lightning_trainer.gateway.auth.quotas import Quotas
from lightning_trainer.gateway.calls.embedded import EmbeddedEngine
from lightning_trainer.gateway.calls.gateway import Gateway
from lightning_trainer.gateway.calls.models import ServedModel, ServedModels
from lightning_trainer.gateway.engine import Engine
from lightning_trainer.gateway.health import Health
from lightning_trainer.gateway.http.asgi import ClientGoneError, send_bytes, send_refusal
from lightning_trainer.gateway.http.errors import Refusal, bad_request, store_down
from lightning_trainer.gateway.http.masking import masking_logger
from lightning_trainer.gateway.http.metrics import Metrics
from lightning_trainer.gateway.ingest.otlp import OtlpReceiver
from lightning_trainer.gateway.ingest.writer import RecordWriter
from lightning_trainer.gateway.intake.intake import Intake
from lightning_trainer.gateway.intake.route import KeyedRoute
from lightning_trainer.gateway.replay.gate import ReplayGate
from lightning_trainer.gateway.replay.sessions import Sessions
from lightning_trainer.gateway.settings import Limits, Routing
from lightning_trainer.gateway.surfaces.chat import ChatSurface
from lightning_trainer.gateway.surfaces.completions import CompletionsSurface
from lightning_trainer.gateway.surfaces.conversations import Conversations
from lightning_trainer.gateway.surfaces.messages import MessagesSurface
from lightning_trainer.gateway.surfaces.responses import ResponsesSurface
from lightning_trainer.gateway.surfaces.surface import Surface
from lightning_trainer.gateway.upstream.control import UpstreamControl
from lightning_trainer.gateway.upstream.upstream import Upstream, UpstreamPolicy
from lightning_trainer.gateway.watched import WatchedEngine, watched_store

logger = masking_logger(__name__)


class App(FastAPI):
    """FastAPI, with the hot paths answered before it, because its layers cost more than an answer does."""

    hot: Mapping[tuple[str, str], ASGIApp]
    metrics: Metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await super().__call__(scope, receive, send)
            return
        path = scope["path"]
        counted = _CountedSend(send, self.metrics, path)
        handler = self.hot.get((scope["method"], _place(path)))
        try:
            if handler is not None:
                await handler(scope, receive, counted)
            elif path.startswith("/v1/") or _is_served(f"/v1{path}", self.hot):
                raise _unserved_refusal(scope, path, self.hot)
            else:
                await super().__call__(scope, receive, counted)
        except ClientGoneError:
            return  # the client has gone
        except Exception as error:
            if counted.started:  # too late for another response: the connection is closed, which the client sees
                raise
            await send_refusal(counted, _refusal(error), path)


def _place(path: str) -> str:
    return "/v1/models/NAME" if path.startswith("/v1/models/") else path


def _is_served(path: str, hot: Mapping[tuple[str, str], ASGIApp]) -> bool:
    return any(place == _place(path) for _, place in hot)


def _refusal(error: Exception) -> Refusal:
    if isinstance(error, Refusal):
        return error
    if isinstance(error, StoreError):
        return store_down(error)
    logger.exception("a request failed", exc_info=error)
    return _server_error(error)


def _server_error(error: Exception) -> Refusal:
    return Refusal(500, f"the server failed: {type(error).__name__}", "server_error")


def _unserved_refusal(scope: Scope, path: str, hot: Mapping[tuple[str, str], ASGIApp]) -> Refusal:
    method = scope["method"]
    if any(name == b"upgrade" and value.lower() == b"websocket" for name, value in scope["headers"]):
        # The status after which codex falls back to HTTP at once; after others it retries the socket several times.
        return Refusal(426, f"{path} has no WebSocket here. Use POST.", code="not_served")
    for meant, needed in ((f"/v1{path}", "must end in /v1"), (path.removeprefix("/v1"), "must not end in /v1")):
        if meant != path and _is_served(meant, hot):
            advice = f"{meant} is: the client's base URL {needed}."
            return Refusal(404, f"{method} {path} is not served here, but {advice}", code="not_served")
    served = ", ".join(f"{verb} {place}" for verb, place in hot if place.startswith("/v1/"))
    status = 405 if any(place == path for _, place in hot) else 404
    return Refusal(status, f"{method} {path} is not served here. There are: {served}.", code="not_served")


class _CountedSend:
    """Sends what it is given, and counts the response when it starts."""

    __slots__ = ("_metrics", "_path", "_send", "started")

    def __init__(self, send: Send, metrics: Metrics, path: str) -> None:
        self._send = send
        self._metrics = metrics
        self._path = path if path in _COUNTED else "/api" if path.startswith("/api/") else "other"
        self.started = False

    def __call__(self, message: Message) -> Awaitable[None]:  # not a coroutine itself: that would be one more per token
        if message["type"] == "http.response.start":
            self.started = True
            self._metrics.request(self._path, message["status"])
        return self._send(message)


_COUNTED = frozenset({
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens",
    "/v1/embeddings", "/v1/models", "/v1/replay/tool", "/v1/traces", "/healthz", "/livez", "/readyz", "/metrics",
})  # fmt: skip


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
    """Create the app.

    Args:
        store: where everything is kept. The caller closes it after the server has stopped.
        keys: issue and check the keys of requests.
        engine: answers calls for `engine.model`; several: each for its own model; None: only upstreams answer.
        upstreams: OpenAI-compatible servers, by the model they serve.
        routing: settings for attempts; the training loop replaces it as ``app.state.routing``.
        limits: sizes and times.
        live: sampling rate and masking of spans with a live key, and of spans and calls with a caller's.
        provider: answers attempts' calls of named agents that are not in ``routing.agents``, by the model they request;
            None: such calls are answered like the others.
        record_untrained: record those calls, without tokens.

    Raises:
        ConfigError: two policies have one name.
    """
    engines = [] if engine is None else list(engine) if isinstance(engine, Sequence) else [engine]
    parts = _Parts(
        store,
        keys=keys,
        engines=engines,
        upstreams=upstreams,
        limits=limits or Limits(),
        provider=provider,
        record_untrained=record_untrained,
    )
    sessions = Sessions(parts.store, lambda: app.state.routing.seed)
    gateway = parts.gateway(lambda: app.state.routing, live)

    async def settle() -> None:
        await gateway.settle()
        await parts.models.close()
        await asyncio.to_thread(parts.writer.close)

    app = _bare_app(settle)
    app.state.routing = routing or Routing(model=engines[0].model if engines else "policy")
    app.state.gateway, app.state.end_calls, app.state.replays = gateway, gateway.end_calls, sessions
    parts.share(app, sessions)
    app.hot = _hot_paths(app, parts, gateway, sessions, live)
    app.include_router(router)
    answer_errors(app)
    return app


class _Parts:
    """What the routes of one app share; the arguments are those of `create_app`."""

    def __init__(
        self,
        store: Store,
        *,
        keys: Keys,
        engines: Sequence[Engine],
        upstreams: Sequence[Upstream],
        limits: Limits,
        provider: Upstream | None,
        record_untrained: bool,
    ) -> None:
        self.store, self.keys, self.limits = watched_store(store), keys, limits
        self.metrics = Metrics()
        self.writer = RecordWriter(self.store, max_waiting_spans=limits.waiting_spans)
        if (backlog := getattr(self.store, "backlog", None)) is not None:  # in-memory stores have none
            self.metrics.watch_queue(backlog)
        self.attempts = EndedAttempts(self.store)
        self.access, self.leases = Access(keys, self.attempts), Leases(self.store)
        self.intake = Intake(limits, Quotas(limits))
        self.embedded = [EmbeddedEngine(cast(Engine, WatchedEngine(each))) for each in engines]
        self.forwarding = [UpstreamPolicy(each) for each in upstreams]
        elsewhere = UpstreamPolicy(provider) if provider is not None else None
        table = _by_name(self.forwarding, self.embedded)
        self.models = ServedModels(table, elsewhere, records_provider=record_untrained)
        self.conversations = Conversations()

    def gateway(self, routing: Callable[[], Routing], live: Live) -> Gateway:
        """Return the gateway of the model calls. It asks `routing` for the settings of each call."""
        return Gateway(
            self.models,
            access=self.access,
            writer=self.writer,
            metrics=self.metrics,
            intake=self.intake,
            routing=routing,
            live=live,
        )

    def share(self, app: App, sessions: Sessions) -> None:
        """Give the parts to the routes of FastAPI and to those who add routes, in ``app.state``."""
        app.metrics = app.state.metrics = self.metrics
        app.state.store, app.state.keys, app.state.access = self.store, self.keys, self.access
        app.state.attempts, app.state.limits, app.state.intake = self.attempts, self.limits, self.intake
        app.state.leases, app.state.models = self.leases, self.models
        app.state.began_ns = time.time_ns()  # attempts that began earlier may have lost calls with an earlier process
        app.state.key_status = lambda: None  # of keys in files, if there are such
        app.state.forget = _forgetter(self.attempts, self.conversations, sessions, self.models)


def _bare_app(at_end: Callable[[], Awaitable[None]]) -> App:
    """Return an app without routes that runs this when the server stops."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:  # noqa: ARG001 - FastAPI's signature
        yield
        await at_end()

    # No documentation pages: FastAPI's load scripts from other hosts. /openapi.json is served.
    app = App(
        title="Lightning-RL",
        version=version("lightning-trainer"),
        description="Rollouts, attempts, records.",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
    )
    app.router.route_class = KeyedRoute  # also for routes that are added later
    return app


def _hot_paths(
    app: App, parts: _Parts, gateway: Gateway, sessions: Sessions, live: Live
) -> dict[tuple[str, str], ASGIApp]:
    """Return what is answered before FastAPI, by method and path."""
    access, intake = parts.access, parts.intake
    surfaces: list[Surface] = [
        ChatSurface(), CompletionsSurface(), ResponsesSurface(parts.conversations), MessagesSurface()
    ]  # fmt: skip
    replays = ReplayGate(sessions, access, intake)
    gateway.register(replays)
    control = UpstreamControl(parts.models, access, intake)
    receiver = OtlpReceiver(
        access=access,
        leases=parts.leases,
        intake=intake,
        writer=parts.writer,
        metrics=parts.metrics,
        limits=parts.limits,
        live=live,
    )
    return {
        **{("POST", surface.path): gateway.on(surface) for surface in surfaces},
        ("POST", "/v1/messages/count_tokens"): gateway.count_tokens,
        ("POST", "/v1/embeddings"): gateway.embeddings,
        ("POST", "/v1/replay/tool"): replays.tool,
        ("GET", "/api/policies"): control.page,
        ("POST", "/api/policies/pause"): control.pause,
        ("POST", "/api/policies/resume"): control.resume,
        ("POST", "/api/policies/adapters"): control.adapters,
        ("GET", "/v1/models"): gateway.models,
        ("GET", "/v1/models/NAME"): gateway.model,
        ("POST", "/v1/traces"): receiver.traces,
        **_pages(app, parts),
    }


def _pages(app: App, parts: _Parts) -> dict[tuple[str, str], ASGIApp]:
    """Return the pages about the server's state and its routes."""
    checked = (parts.store, parts.writer, parts.embedded, parts.forwarding)
    health = Health(*checked, lambda: app.state.key_status())  # noqa: PLW0108 - set later
    return {
        ("GET", "/healthz"): health.page,
        ("GET", "/livez"): health.live,
        ("GET", "/readyz"): health.ready,
        ("GET", "/metrics"): app.metrics.page,
        ("GET", "/openapi.json"): _description(app),
    }


def _description(app: FastAPI) -> ASGIApp:
    """Return the page ``/openapi.json``. It is written once, because requests for it need no key."""
    written: list[bytes] = []

    async def page(_scope: Scope, _receive: Receive, send: Send) -> None:
        """Describe the server's routes in OpenAPI's format."""
        if not written:
            written.append(await asyncio.to_thread(lambda: orjson.dumps(app.openapi())))
        await send_bytes(send, written[0])

    return page


def _by_name(forwarding: Sequence[UpstreamPolicy], embedded: Sequence[EmbeddedEngine]) -> dict[str, ServedModel]:
    policies: list[tuple[str, ServedModel]] = [(each.upstream.model, each) for each in forwarding]
    policies += [(each.engine.model, each) for each in embedded]
    table = dict(policies)
    if len(table) < len(policies):
        listed = ", ".join(name for name, _ in policies)
        raise ConfigError(f"two policies have the same name: {listed}. Give each --upstream a name of its own.")
    return table


def _forgetter(
    attempts: EndedAttempts, conversations: Conversations, sessions: Sessions, models: ServedModels
) -> Callable[[str], None]:
    def forget(attempt_id: str) -> None:
        attempts.ended(attempt_id)
        conversations.forget(attempt_id)
        sessions.forget(attempt_id)
        for model in models.by_name().values():
            model.forget(attempt_id)

    return forget


def answer_errors(app: FastAPI) -> None:
    """Return every error of FastAPI in OpenAI's format."""

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

    @app.exception_handler(Exception)  # it is raised again after the response, and logged by uvicorn
    async def failed(_: Request, error: Exception) -> Response:
        return told(_server_error(error))

    @app.exception_handler(HTTPException)
    async def http(_: Request, error: HTTPException) -> Response:
        kind = "invalid_request_error" if error.status_code < 500 else "server_error"
        return told(Refusal(error.status_code, str(error.detail), kind))
