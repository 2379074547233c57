"""Rerouting: calls of agents in training use our own client, so that nothing else of the user's client is sent.

Headers, query, cookies, authentication, Azure paths, proxies and event hooks of the user's client are not removed one
by one: the new client never has them. It takes over the body, the limits on time and retries, and a few headers.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from openai import (
    APIConnectionError,
    APITimeoutError,
    AsyncOpenAI,
    DefaultAsyncHttpxClient,
    DefaultHttpxClient,
    NotGiven,
    OpenAI,
)
from openai._base_client import AsyncAPIClient
from openai._compat import model_copy

from lightning_spans.record.process import in_child
from lightning_spans.schema.attempts import Attempt
from lightning_spans.schema.spans import Json
from lightning_spans.store.tls import trusted_certificates

if TYPE_CHECKING:
    from openai._models import FinalRequestOptions

    from lightning_spans.hooks import OpenSpan

AGENT_HEADER: Final = "x-lightning-agent"
SPAN_HEADER: Final = "x-lightning-traceparent"  # the user's own tracing may overwrite `traceparent`
REPLAY_HEADER: Final = "x-lightning-replay"
ASKS: Final = {REPLAY_HEADER: "asks"}  # marks a replay's calls: what is not in the record can be sent on from here
_OWN: Final = "own"  # header of the answer: the call must be sent on
LEFT: Final = "replay_own"  # the code in its body
_TIMEOUT, _CONNECTION = "timeout", "connection"  # header of the answer: the record has none
# Options that the caller gave with the call. The last two are the openai client's own notes.
_TAKEN: Final = ("content-type", "accept", "idempotency-key", "x-stainless-", "____stainless")
# Headers that are sent in the end.
_SENT: Final = (
    "host", "content-type", "content-length", "transfer-encoding", "connection", "accept", "accept-encoding",
    "user-agent", "idempotency-key", "x-stainless-", "authorization", "traceparent", AGENT_HEADER,
    SPAN_HEADER, REPLAY_HEADER,
)  # fmt: skip


class _Gate:
    """Checks each request last: what is not on the list is not sent, whatever its source (environment, cookies)."""

    def _filter(self, request: Any) -> None:
        for name in list(request.headers):
            if not name.lower().startswith(_SENT):
                del request.headers[name]


class _Client(_Gate, OpenAI):
    def _prepare_request(self, request: Any) -> None:
        self._filter(request)


class _AsyncClient(_Gate, AsyncOpenAI):
    async def _prepare_request(self, request: Any) -> None:
        self._filter(request)


def reroute_call(
    client: Any,
    options: FinalRequestOptions,
    attempt: Attempt,
    endpoint: str,
    *,
    body: Mapping[str, Json],
    headers: Mapping[str, str],
) -> tuple[Any, FinalRequestOptions]:
    """Return the client and options that send a call to its attempt's gateway.

    Args:
        client: the user's client; only its limits are taken over.
        options: the caller's; not changed.
        attempt: provides URL, model and key.
        endpoint: ``/chat/completions``, ``/completions`` or ``/responses``.
        body: the whole body of the request.
        headers: added to what is sent.
    """
    copy = with_body(options, body)
    copy.url = endpoint
    copy.params = {}
    given = options.headers if isinstance(options.headers, Mapping) else {}
    taken = {name: value for name, value in given.items() if name.lower().startswith(_TAKEN)}
    copy.headers = {**taken, **headers, "Authorization": f"Bearer {attempt.key or ''}"}
    if attempt.replay is not None:
        copy.headers = {**copy.headers, **ASKS}
    if isinstance(options.timeout, NotGiven):
        copy.timeout = client.timeout
    if isinstance(options.max_retries, NotGiven):
        copy.max_retries = client.max_retries
    base = f"{attempt.endpoint}/v1"
    strict = bool(client._strict_response_validation)
    if isinstance(client, AsyncAPIClient):
        return _async_client(base, strict), copy
    return _sync_client(base, strict), copy


def is_own(error: BaseException) -> bool:
    """Whether the gateway left a replayed call to the program's own endpoint."""
    response = getattr(error, "response", None)
    return response is not None and is_left(getattr(error, "status_code", None), response.headers)


def is_left(status: int | None, headers: Mapping[str, str]) -> bool:
    """Whether an answer of the gateway leaves a replayed call to the program's own endpoint."""
    return status == 421 and headers.get(REPLAY_HEADER) == _OWN


def own_headers(attempt: Attempt, span: OpenSpan) -> dict[str, str]:
    """Return the headers of a call to the gateway: the attempt's key, span and agent, and whether it is a replay."""
    asks = {} if attempt.replay is None else ASKS
    key = {"authorization": f"Bearer {attempt.key or 'unused'}"}
    its = {"traceparent": span.traceparent, SPAN_HEADER: span.traceparent}
    return {**key, **its, **agent_header(span.path), **asks}


def raise_unanswered(error: BaseException) -> None:
    """Raise the recorded exception of a call without an answer; return if the error itself is the answer.

    Raises:
        openai.APITimeoutError: it timed out.
        openai.APIConnectionError: it could not connect, or lost the connection.
    """
    response = getattr(error, "response", None)
    if response is None:
        return
    what = response.headers.get(REPLAY_HEADER)
    if what == _TIMEOUT:
        raise APITimeoutError(request=response.request) from None
    if what == _CONNECTION:
        raise APIConnectionError(request=response.request) from None


def with_body(options: FinalRequestOptions, body: Mapping[str, Json]) -> FinalRequestOptions:
    """Return options with another body. The caller's are not changed."""
    copy = model_copy(options)
    copy.json_data = dict(body)
    copy.extra_json = None
    if hasattr(copy, "content"):  # newer clients: a body that the caller wrote as text
        copy.content = None
    return copy


def agent_header(agent: str | None) -> dict[str, str]:
    """Return the header that names the agent by its path, percent-encoded because header values are ASCII."""
    return {} if agent is None else {AGENT_HEADER: quote(agent, safe="/")}


def server_headers(store: str | None, url: object, span: OpenSpan, sent: Mapping[str, str]) -> dict[str, str]:
    """Return headers for a call that goes to the attempt's gateway, or to the server that gets the spans.

    They name its span, and to the server its agent, unless the caller names one himself. Empty for any other endpoint.

    Args:
        store: where spans outside of attempts go.
        url: of the call.
        span: of the call.
        sent: the headers of the call.
    """
    is_server = store is not None and store.startswith(("http://", "https://")) and is_below(url, store)
    if not is_server and (span.attempt is None or not is_below(url, span.attempt.endpoint)):
        return {}
    agent = agent_header(span.path) if is_server and AGENT_HEADER not in sent else {}
    return {SPAN_HEADER: span.traceparent, **agent}


def is_below(url: object, base: str | None) -> bool:
    """Whether a URL belongs to the server with this base URL."""
    return bool(base) and str(url).startswith(f"{str(base).rstrip('/')}/")


_lock = threading.Lock()
_sync: dict[tuple[str, bool], _Client] = {}
_http: dict[str, Any] = {}  # by library
_by_loop: dict[asyncio.AbstractEventLoop, dict[tuple[str, bool], Any]] = {}  # by base URL, or library


def _sync_client(base_url: str, strict: bool) -> _Client:
    with _lock:
        if (base_url, strict) not in _sync:
            http = DefaultHttpxClient(trust_env=False, verify=trusted_certificates())
            client = _Client(base_url=base_url, http_client=http, _strict_response_validation=strict, **_NOBODY)
            weakref.finalize(client, http.close)  # streams hold the client, so none is cut off
            _sync[base_url, strict] = _anonymous(client)
        return _sync[base_url, strict]


def _async_client(base_url: str, strict: bool) -> _AsyncClient:
    clients = _of_loop()
    if (base_url, strict) not in clients:
        http = DefaultAsyncHttpxClient(trust_env=False, verify=trusted_certificates())
        client = _AsyncClient(base_url=base_url, http_client=http, _strict_response_validation=strict, **_NOBODY)
        clients[base_url, strict] = _anonymous(client)
    made: _AsyncClient = clients[base_url, strict]
    return made


def _of_loop() -> dict[tuple[str, bool], Any]:
    """Return this event loop's clients. A connection belongs to the loop that opened it, so each loop has its own."""
    loop = asyncio.get_running_loop()
    with _lock:
        if loop not in _by_loop:
            for ended in [known for known in _by_loop if known.is_closed()]:
                del _by_loop[ended]
        return _by_loop.setdefault(loop, {})


def http_client(library: ModuleType, *, asynchronous: bool) -> Any:
    """Return an httpx or httpx2 client that sends only what it is given."""
    if not asynchronous:
        with _lock:
            if library.__name__ not in _http:
                _http[library.__name__] = library.Client(trust_env=False, verify=trusted_certificates())
            return _http[library.__name__]
    clients = _of_loop()
    key = library.__name__, False
    if key not in clients:
        clients[key] = library.AsyncClient(trust_env=False, verify=trusted_certificates())
    return clients[key]


def forget() -> None:
    """Drop all clients. Running calls keep theirs until they end."""
    with _lock:
        _sync.clear()
        _http.clear()
        _by_loop.clear()


def _after_fork() -> None:
    """Create new clients in a forked child: on the parent's connections it would read the parent's answers."""
    global _lock  # noqa: PLW0603 - another thread of the parent's may hold it
    _lock = threading.Lock()
    _parents.extend([*_sync.values(), *_http.values(), *_by_loop.items()])
    _sync.clear()
    _http.clear()
    _by_loop.clear()


_parents: Final[list[object]] = []  # in a forked child: not closed here, because the parent uses them
in_child(_after_fork)


# Given explicitly, so that the client does not read the environment; every request replaces the key.
_NOBODY: Final[dict[str, Any]] = {"api_key": "unused", "organization": "", "project": "", "webhook_secret": ""}


def _anonymous(client: Any) -> Any:
    client.organization = client.project = client.webhook_secret = None
    return client
