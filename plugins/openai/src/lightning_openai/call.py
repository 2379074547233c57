"""One model call, from before it is sent until its answer has been read: its chat span and what goes into it."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import orjson
from openai._compat import model_copy

from lightning_openai import gateway
from lightning_openai.assemble import is_whole, put_together, read_events
from lightning_openai.facts import request_facts, response_facts
from lightning_openai.leftovers import leftovers
from lightning_openai.tee import body_of, tee
from lightning_openai.watch import current_watch
from lightning_spans import spans as names

if TYPE_CHECKING:
    from lightning_spans.recorder import Recorder
    from lightning_spans.spans import Json

PLUGIN: Final = "lightning_openai"
_PATHS: Final = ("/chat/completions", "/responses")


@functools.lru_cache(256)
def endpoint_of(method: str, url: str) -> str | None:
    """Give which model call a request is, by its path alone; None when it is none.

    The URL may be relative, absolute, or Azure's (``/deployments/NAME/chat/completions``).
    """
    if method.lower() != "post":
        return None
    path = url.partition("?")[0].rstrip("/")
    return next((known for known in _PATHS if path.endswith(known) or f"/{path}" == known), None)


class Call:
    """What `wire` keeps of one call. Its methods never raise."""

    def __init__(self, recorder: Recorder, client: Any, options: Any, endpoint: str, *, streamed: bool) -> None:
        body = _body(options)
        facts = request_facts(body)
        provider = "azure.ai.openai" if "Azure" in type(client).__name__ else "openai"
        attributes = {
            names.FRAMEWORK: "openai",
            names.PROVIDER: provider,
            names.ENDPOINT: endpoint,
            names.STREAMED: streamed,
            **facts,
        }
        self._recorder = recorder
        self._endpoint = endpoint
        self._streamed = streamed
        self._body = body
        self._response: Any = None
        self._to_end = False
        self._events: int | None = None  # items of an event stream that the agent took; None: it reads in another way
        self._seen_ns = 0
        self.pending = False  # the body is still to be read
        self.reading = False  # the next item of an event stream is being read: how that ends says what became of it
        watch = current_watch()
        context = watch.outside() if watch is not None else None
        name = facts.get(names.REQUEST_MODEL, "chat")
        self.span = recorder.start(names.CHAT, name, context=context, attributes=attributes)
        self.client, self.options = self._route(client, options)
        if watch is not None:
            watch.called()

    def _route(self, client: Any, options: Any) -> tuple[Any, Any]:
        traceparent = {"traceparent": self.span.traceparent}
        attempt = self.span.attempt
        if attempt is not None and self._recorder.reroutes(self.span):
            headers = {**traceparent, **gateway.agent_header(self.span.agent)}
            client, copy = gateway.rerouted(client, options, attempt, self._endpoint, body=self._body, headers=headers)
            self.span.set(**{names.REROUTED: True, names.REQUEST_MODEL: attempt.model})
            self.span.name = attempt.model
            self._body["model"] = attempt.model
        else:
            copy = model_copy(options)
            given = options.headers if isinstance(options.headers, Mapping) else {}
            own = any(name.lower() == "traceparent" for name in given)
            copy.headers = given if own else {**given, **traceparent}
        self.span.set(**{names.SERVER_ADDRESS: client.base_url.host})
        return client, copy

    def responded(self, response: Any) -> None:
        """Take the answer, before the client makes its own objects of it."""
        with self._recorder.guard(PLUGIN, self.span):
            self._response = response
            response.extensions[PLUGIN] = self
            self._seen_ns = time.time_ns()
            if not response.is_stream_consumed:
                self.pending = True
                tee(response, self)

    def returned(self, answer: Any) -> None:
        """End the span of a call that is complete as it returns to the agent."""
        if self.pending:
            return
        with self._recorder.guard(PLUGIN, self.span):
            text = body_of(self._response) if self._response is not None else None
            parsed = answer if hasattr(answer, "id") else _parse(text)
            self._end(text, parsed)

    def failed(self, error: BaseException) -> None:
        """End the span of a call that raised."""
        with self._recorder.guard(PLUGIN, self.span):
            if self.span.end_ns is not None:
                return
            status = getattr(error, "status_code", None)
            if isinstance(status, int):
                self.span.set(**{"http.response.status_code": status})
            if self._response is None:
                self._request(getattr(error, "request", None))
                self.span.end(error=error)
            elif self.pending:
                self._end_stream(error)
            else:  # the answer came, the client could not take it
                text = body_of(self._response)
                self._end(text, _parse(text), error)

    def began(self) -> None:
        """The answer is read as an event stream."""
        self._events = 0

    def took(self) -> None:
        """The agent takes one more item of the event stream."""
        self.reading = False
        self._events = (self._events or 0) + 1
        self._seen_ns = time.time_ns()

    def read_to_end(self) -> None:
        """The body is complete."""
        self._to_end = True
        if self._events is None:
            self._seen_ns = time.time_ns()

    def read_failed(self, error: BaseException) -> None:
        """Reading raised. An event stream makes another error of it for the agent, so that one is waited for."""
        if not self.reading:
            self.failed(error)

    def closed(self) -> None:
        """End the span: nobody reads any further. Perhaps it is the garbage collector that says so: see `leftovers`."""
        if self.span.end_ns is not None or self.reading:
            return
        if self._to_end:
            self.end_left()
        else:
            leftovers.take(self)

    def end_left(self) -> None:
        """End the span with what was read."""
        if self.span.end_ns is None:
            with self._recorder.guard(PLUGIN, self.span):
                self._end_stream(None)

    def _end_stream(self, error: BaseException | None) -> None:
        text = body_of(self._response)
        if not self._streamed:
            parsed = _parse(text)
            self.span.set(**{names.ABANDONED: None if self._to_end else True})
            self._end(text, parsed, error)
            return
        events, done = read_events(text)
        taken = events if self._events is None else events[: self._events]
        response = put_together(self._endpoint, taken)
        whole = (self._to_end or done) and len(taken) == len(events)
        left = error is None or isinstance(error, asyncio.CancelledError)
        if left and not whole and not is_whole(self._endpoint, response):
            self.span.set(**{names.ABANDONED: True})
        self._end(None if response is None else orjson.dumps(response).decode(), response, error)

    def _end(self, text: str | None, parsed: Any, error: BaseException | None = None) -> None:
        request = self._response.request if self._response is not None else None
        self._request(request)
        facts = response_facts(self._endpoint, parsed) if parsed is not None else {}
        end_ns = None if error is not None else self._seen_ns or None
        self.span.end(error=error, attributes={names.RESPONSE: text, **facts}, end_ns=end_ns)

    def _request(self, request: Any) -> None:
        """Keep the request as it was sent; as it was to be sent where it never was."""
        retries = request.headers.get("x-stainless-retry-count", "0") if request is not None else "0"
        self.span.set(
            **{
                names.REQUEST: _sent(request) or orjson.dumps(self._body, default=str).decode(),
                "http.request.resend_count": int(retries) if retries.isdigit() and retries != "0" else None,
            }
        )


def _body(options: Any) -> dict[str, Json]:
    """Give the JSON body of a request: what the caller gave in pieces, or wrote out himself."""
    given = options.json_data if options.json_data is not None else getattr(options, "content", None)
    if isinstance(given, bytes | bytearray):
        given = _parse(given)
    extra = options.extra_json if isinstance(options.extra_json, Mapping) else {}
    return {**given, **extra} if isinstance(given, Mapping) else dict(extra)


def _sent(request: Any) -> str | None:
    content = getattr(request, "_content", None)  # `.content` raises where a body is itself a stream
    return content.decode() if isinstance(content, bytes) and content else None


def _parse(text: str | bytes | bytearray | None) -> dict[str, Json] | None:
    try:
        parsed = orjson.loads(text or "")
    except orjson.JSONDecodeError:
        return None
    return parsed if isinstance(parsed, dict) else None
