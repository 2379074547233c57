"""One model call, from before it is sent until its answer has been read: its chat span and the span's content."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, TypeGuard

import orjson

from lightning_openai import reroute
from lightning_openai.attributes import request_attributes, response_attributes
from lightning_openai.call_state import OPEN, SENT, WHOLE, CallDestination
from lightning_openai.events import is_whole, read_events
from lightning_openai.json_text import to_json
from lightning_openai.reading.abandoned import abandoned
from lightning_openai.reading.recorded_body import RecordedBody, body_of, record_body
from lightning_openai.reading.unfinished import unfinished
from lightning_spans.chat.stream import put_together
from lightning_spans.record.instrument.scope import current_scope, scopes_around
from lightning_spans.record.prompts import with_prompts
from lightning_spans.record.recorder import log_failure
from lightning_spans.schema import spans as names
from lightning_spans.schema.json import read_object

if TYPE_CHECKING:
    from lightning_spans.hooks import Recorder
    from lightning_spans.schema.spans import Json

PLUGIN: Final = "lightning_openai"
_PATHS: Final = ("/chat/completions", "/completions", "/responses")  # the first match counts


@functools.lru_cache(256)
def endpoint_of(method: str, url: str) -> str | None:
    """Return the endpoint of a model call from a request's path; None if the request is not a model call.

    The URL may be relative, absolute, or Azure's (``/deployments/NAME/chat/completions``).
    """
    if method.lower() != "post":
        return None
    path = url.partition("?")[0].rstrip("/")
    return next((known for known in _PATHS if path.endswith(known) or f"/{path}" == known), None)


# The code that every call runs uses `try` instead of `guard`: entering and leaving a guard costs three function calls.


class ModelCall:
    """The state that `patch` keeps of one call. Its methods never raise.

    The agent's thread only stores references. The bodies are parsed when the span is delivered (`_told`). Until then
    none of the client's objects are held: the agent could not reuse their memory, and allocating new memory is slow.
    """

    def __init__(
        self, recorder: Recorder, client: Any, options: Any, endpoint: str, method: Any, *, streamed: bool
    ) -> None:
        self._recorder = recorder
        self._user = client
        self._method = method  # of the client's class: a request that it passes on is the same call
        self._endpoint = endpoint
        self._body: Mapping[str, Json] = _body(options)
        self._request: Any = None
        self._asked: bytes | None = None  # the body of the request
        self._retries: int | None = None
        self._recorded: RecordedBody | None = None  # the body of the response; None: there was no response
        self._refusal: bytes | None = None  # the body of the response, if it was an error
        self._chunks: int | None = None  # the body's state when the span ended
        self._prompted: Mapping[str, Json] | None = (
            None  # the body with the agent's replaced prompt; None: the agent's own prompt
        )
        self._destination = CallDestination.PROGRAM
        self.state = SENT
        self._failed = False  # an error occurred, other than that the agent stopped reading
        self.events: int | None = None  # items of an event stream that the agent took; None: it reads in another way
        self.seen_ns = 0
        self._kind = ""  # the content type of a complete answer to a streamed call
        scope = current_scope()
        context = None if scope is None else scope.call_begins()
        model = self._body.get("model")
        attributes = {
            names.FRAMEWORK: "openai",
            names.PROVIDER: "azure.ai.openai" if "Azure" in type(client).__name__ else "openai",
            names.ENDPOINT: endpoint,
            names.STREAMED: streamed,
            **request_attributes(self._body),
        }
        name = "chat" if model is None else str(model)
        self.span = recorder.start(names.CHAT, name, context=context, attributes=attributes)
        self.client: Any = client
        self._options: Any = options
        self._base_url = client.base_url
        if scope is not None:
            scope.call_began()

    def covers(self, client: Any, options: Any, method: Any) -> bool:
        """Whether a request is this call on its way through its client's methods or another patch.

        A method of a subclass may pass on other options than it was given.
        """
        if client is self._user:
            return options is self._options or method is not self._method
        return client is not None and client is self.client  # the client that sends it to the gateway

    def sent_by(self, client: Any, options: Any) -> tuple[Any, Any]:
        """Return the client and options that send the call: to the gateway if its agent is in training.

        In a replay every call goes to the gateway first; see `sent_on`.
        """
        options = self._with_prompts(client, options)
        span, attempt = self.span, self.span.attempt
        if client is not self._user or attempt is None or self._destination is CallDestination.RETURNED:
            return client, options
        trained = self._recorder.reroutes(span)
        if not trained and (attempt.replay is None or attempt.endpoint is None):
            return client, options
        try:
            body, headers = _body(options), reroute.agent_header(span.path)
            body = {**body, "model": attempt.model} if trained else body
            client, copy = reroute.reroute_call(client, options, attempt, self._endpoint, body=body, headers=headers)
            span.set(**{names.REROUTED: True})
            if trained:
                span.set(**{names.REQUEST_MODEL: attempt.model})
                span.name = attempt.model
            self._body = body
            self.client, self._base_url, self._destination = client, client.base_url, CallDestination.GATEWAY
        except Exception as error:  # noqa: BLE001 - logged
            log_failure(PLUGIN, error, span)
            return self._user, options
        return client, copy

    def sent_on(self, error: BaseException, options: Any) -> tuple[Any, Any] | None:
        """Return the user's client and options if the gateway leaves a replayed call to them; None otherwise."""
        if self.client is self._user or not reroute.is_own(error):
            return None
        lead: Any = next((scope.call for scope in scopes_around() if getattr(scope.call, "leads", False)), None)
        if lead is not None:  # whoever sent it to the gateway knows its own endpoint
            self._destination, lead.left = CallDestination.REPLACED, True
            return None
        if self._prompted is not None:  # the replaced system prompt is sent too
            options = reroute.with_body(options, self._body)
        self.client, self._base_url = self._user, self._user.base_url
        self._destination = CallDestination.RETURNED
        self.span.attributes.pop(names.REROUTED, None)
        return self._user, options

    def _with_prompts(self, client: Any, options: Any) -> Any:
        """Return options whose body has the agent's replaced system prompt, if there is one."""
        if self._prompted is not None or client is not self._user:
            return options
        try:
            body = with_prompts(_body(options), self.span.path, self.span.attempt)
            if body is None:
                return options
            self._prompted = self._body = body
            return reroute.with_body(options, body)
        except Exception as error:  # noqa: BLE001 - logged
            log_failure(PLUGIN, error, self.span)
            return options

    def sends(self, client: Any) -> bool:
        """Whether this httpx client sends the call itself. A client that only fetches a token for it does not."""
        return getattr(self.client, "_client", None) is client

    def name(self, request: Any) -> None:
        """Put the span's id into a request about to be sent, unless the caller has put its own there."""
        try:
            if "traceparent" not in request.headers:
                request.headers["traceparent"] = self.span.traceparent
            store = self._recorder.store
            request.headers.update(reroute.server_headers(store, request.url, self.span, request.headers))
        except Exception as error:  # noqa: BLE001 - logged
            log_failure(PLUGIN, error, self.span)

    def responded(self, response: Any, retries: int | None) -> None:
        """Take the answer before the client parses it, with the number of retries if known."""
        if self.span.end_ns is not None:  # recording has stopped since
            return
        try:
            self._request, self._retries = response.request, retries
            response.extensions[PLUGIN] = self
            self.seen_ns = time.time_ns()
            if response.is_stream_consumed:
                self.state, self._recorded = WHOLE, RecordedBody([response.content])
                if self.span.attributes[names.STREAMED]:
                    self._kind = response.headers.get("content-type", "")
            else:
                self.state, self._recorded = OPEN, record_body(response, self)
        except Exception as error:  # noqa: BLE001 - logged
            log_failure(PLUGIN, error, self.span)

    def returned(self) -> None:
        """End the span of a call that is complete when it returns to the agent."""
        if not self.state.is_streamed:
            self.end_left()

    def failed(self, error: BaseException) -> None:
        """End the span of a call that raised."""
        with self._recorder.guard(PLUGIN, self.span):
            if self._destination is CallDestination.REPLACED:
                unfinished.discard(self)
                self.leave()
            if self.span.end_ns is not None:
                return
            status = getattr(error, "status_code", None)
            if isinstance(status, int):
                self.span.set(**{"http.response.status_code": status})
            if self._recorded is None:
                self._request = getattr(error, "request", None)
                self._refusal = _content(getattr(error, "response", None))
            self._end(error)

    def read_to_end(self) -> None:
        """Note that the body is complete."""
        self.state = self.state.ended
        if self.events is None:
            self.seen_ns = time.time_ns()

    def read_failed(self, error: BaseException) -> None:
        """Note that reading failed. An event stream raises another error to the agent, so wait for that one."""
        if not self.state.is_waiting:
            self.failed(error)

    def closed(self) -> None:
        """End the span because nobody reads the rest. The garbage collector may call this; see `abandoned`."""
        if self.span.end_ns is not None or self.state.is_waiting:
            return
        if self.state.is_complete:
            self.end_left()
        else:
            abandoned.take(self.end_left)

    def end_left(self) -> None:
        """End the span with what was read."""
        if self.span.end_ns is None:
            try:
                self._end(None)
            except Exception as error:  # noqa: BLE001 - logged
                log_failure(PLUGIN, error, self.span)

    def leave(self) -> None:
        """Leave the span to the parent of a forked child. In the child it counts as ended."""
        self.span.end_ns = self.span.start_ns

    def _end(self, error: BaseException | None) -> None:
        """Store what belongs to the agent. The rest is done later: what `_told` reads no longer changes."""
        end_ns = None
        unfinished.discard(self)
        request, self._request = self._request, None
        if self._recorded is not None:
            self._chunks = len(self._recorded.chunks)
            end_ns = self.seen_ns or None if error is None else None
        self._asked = _content(request)
        if self._asked is None:
            self.span.set(**{names.REQUEST: to_json(self._body)})
        elif self._retries is None:
            self._retries = _retries(request)
        self._failed = error is not None and not isinstance(error, asyncio.CancelledError)
        self.client = self._user = self._options = None
        self._body = {}
        self.span.end(error=error, end_ns=end_ns, later=self._told)

    def _told(self) -> None:
        """Add the attributes of request and response."""
        told = self.span.attributes
        told[names.SERVER_ADDRESS] = self._base_url.host
        if self._asked is not None:
            told[names.REQUEST] = _decode_content(self._asked)
            if self._retries:
                told["http.request.resend_count"] = self._retries
        if self._recorded is None:
            if self._refusal is not None:
                told[names.RESPONSE] = self._refusal.decode(errors="replace")
            if self.span.status == "ok":
                told[names.ABANDONED] = True  # recording stopped before the answer arrived
            return
        text, state = body_of(self._recorded, self._chunks), self.state
        if not self._is_event_stream():
            if not state.is_complete:
                told[names.ABANDONED] = True
            told[names.RESPONSE] = text
            told.update(response_attributes(self._endpoint, read_object(text) or {}))
            return
        events = read_events(
            text, self.events if state.is_streamed else None
        )  # otherwise it ended before the agent took an item
        response = put_together(self._endpoint, events.found)
        whole = (state.is_complete or events.done) and not events.more
        if not self._failed and not whole and not is_whole(self._endpoint, response):
            told[names.ABANDONED] = True
        if response is not None:
            told[names.RESPONSE] = orjson.dumps(response).decode()
            told.update(response_attributes(self._endpoint, response))

    def _is_event_stream(self) -> bool:
        """Whether the body is an event stream: as requested for a streamed body, otherwise by its content type."""
        if not self.span.attributes[names.STREAMED]:
            return False
        return self.state.is_streamed or "text/event-stream" in self._kind


def _body(options: Any) -> Mapping[str, Json]:
    """Return a request's JSON body, for reading only. The caller may have given it in parts, or as text."""
    given = options.json_data if options.json_data is not None else getattr(options, "content", None)
    if isinstance(given, bytes | bytearray):
        given = read_object(given)
    body = given if _is_mapping(given) else {}
    return {**body, **options.extra_json} if _is_mapping(options.extra_json) else body


def _is_mapping(value: object) -> TypeGuard[Mapping[str, Any]]:
    # A negative isinstance check of an abstract class is slow.
    return type(value) is dict or (value is not None and isinstance(value, Mapping))


def _content(message: Any) -> bytes | None:
    """Return the body of a request, or of a response that was read."""
    content = getattr(message, "_content", None)  # `.content` raises if a body is itself a stream
    return content if isinstance(content, bytes) and content else None


def _retries(request: Any) -> int:
    given = request.headers.get("x-stainless-retry-count", "0")
    return int(given) if given.isdigit() else 0


def _decode_content(content: bytes) -> str:
    return content.decode()
