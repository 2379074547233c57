"""Model calls that a program sends with httpx, or with a client that uses it: Anthropic's, Mistral's, Groq's, ...

They are recorded where httpx sends a request, if nothing else creates their span and path and body are in OpenAI's or
Anthropic's format; `foreign` handles other vendors' formats. Each retry is a request of its own, and so a span. Calls
of agents in training are sent to the gateway with only the body, the time limits and the headers that state its format.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from lightning_openai import reroute
from lightning_openai.attributes import request_attributes, response_attributes
from lightning_openai.call import PLUGIN, endpoint_of
from lightning_openai.events import is_whole, read_events
from lightning_openai.reading.abandoned import abandoned
from lightning_openai.reading.anthropic_stream import MESSAGES, message_of_events
from lightning_openai.reading.recorded_body import RecordedBody, body_of, record_body
from lightning_openai.reading.unfinished import unfinished
from lightning_spans.chat.stream import put_together
from lightning_spans.record.instrument.scope import current_scope
from lightning_spans.record.prompts import with_prompts
from lightning_spans.record.recorder import log_failure
from lightning_spans.schema import spans as names
from lightning_spans.schema.json import dumps, read_object

if TYPE_CHECKING:
    from lightning_spans.hooks import OpenSpan, Recorder
    from lightning_spans.schema.attempts import Attempt
    from lightning_spans.schema.spans import Json

_KEPT: Final = ("content-type", "accept", "user-agent", "anthropic-version", "anthropic-beta")  # to the gateway


def endpoint_in(request: Any, body: Mapping[str, Json]) -> str | None:
    """Return the endpoint of a model call; None if the request is not in OpenAI's or Anthropic's format.

    The path alone does not decide: services that send text messages have ``/v1/messages``, too.
    """
    path = request.url.path
    endpoint = MESSAGES if path.rstrip("/").endswith(MESSAGES) else endpoint_of(request.method, path)
    return endpoint if endpoint is not None and _is_model_request(endpoint, body) else None


def _is_model_request(endpoint: str, body: Mapping[str, Json]) -> bool:
    """Whether a body has what the format requires. Chat completions on Azure, for example, need no name of a model."""
    named = isinstance(body.get("model"), str)
    if endpoint == "/responses":
        return (named and "input" in body) or isinstance(body.get("prompt"), Mapping)
    if endpoint == "/completions" and "prompt" in body:
        return True
    return isinstance(body.get("messages"), list) and (named or endpoint != MESSAGES)


class HttpxCall:
    """One request, until its answer has been read. Its methods never raise."""

    def __init__(self, recorder: Recorder, client: Any, request: Any, endpoint: str, body: Mapping[str, Json]) -> None:
        self._recorder = recorder
        self._client, self._request = client, request
        self._library = _library(client)
        self._endpoint = endpoint
        self._body = body
        self._asked: bytes = request.content
        self._recorded: RecordedBody | None = None  # the body of the answer; None: there was none
        self._chunks: int | None = None  # the body's state when the span ended
        self._status = 200
        self._events = False  # the answer is an event stream
        self._to_end = False
        self.span = self._begin(recorder)
        unfinished.add(self)

    def _begin(self, recorder: Recorder) -> OpenSpan:
        scope = current_scope()
        context = None if scope is None else scope.call_begins()
        facts: dict[str, Json] = {
            names.FRAMEWORK: self._library.__name__,
            names.PROVIDER: self._provider,
            names.ENDPOINT: self._endpoint,
            names.STREAMED: bool(self._body.get("stream")),
            names.SERVER_ADDRESS: self._request.url.host,
            **request_attributes(self._body),
        }
        span = recorder.start(names.CHAT, str(self._body.get("model", "chat")), context=context, attributes=facts)
        if scope is not None:
            scope.call_began()
        return span

    @property
    def _provider(self) -> str | None:
        return "anthropic" if self._endpoint == MESSAGES else None

    def refused(self) -> Any:
        """Return the response to a call that must not be sent; None if it may be sent."""
        return None

    def sent_by(self) -> tuple[Any, Any]:
        """Return the client and request that send the call: to the gateway if its agent is in training.

        In a replay every call goes to the gateway first; see `sent_on`.
        """
        span, attempt = self.span, self.span.attempt
        try:
            self._with_prompts(attempt)
            sent = self._request.headers
            sent.setdefault("traceparent", span.traceparent)
            sent.update(reroute.server_headers(self._recorder.store, self._request.url, span, sent))
            trained = self._recorder.reroutes(span)
            if attempt is None or attempt.endpoint is None or not self._is_sent_there(attempt, trained=trained):
                return self._client, self._request
            return self._rerouted(f"{attempt.endpoint}/v1{self._endpoint}", attempt, trained=trained)
        except Exception as error:  # noqa: BLE001 - logged
            log_failure(PLUGIN, error, span)
            return self._client, self._request

    def _with_prompts(self, attempt: Attempt | None) -> None:
        """Put the agent's replaced prompt into the request, if there is one."""
        prompted = with_prompts(self._body, self.span.path, attempt)
        if prompted is not None:
            self._body = prompted
            self._request = self._other(self._request.url, self._request.headers, prompted)

    def _is_sent_there(self, attempt: Attempt, *, trained: bool) -> bool:
        """Whether the call goes to the gateway."""
        return trained or attempt.replay is not None

    def _rerouted(self, url: str, attempt: Attempt, *, trained: bool) -> tuple[Any, Any]:
        span = self.span
        body = {**self._body, "model": attempt.model} if trained else self._body
        headers = {name: value for name, value in self._request.headers.items() if name.lower() in _KEPT}
        headers |= reroute.own_headers(attempt, span)
        request = self._other(url, headers, body)
        client = reroute.http_client(self._library, asynchronous=isinstance(self._client, self._library.AsyncClient))
        span.set(**{names.REROUTED: True, names.SERVER_ADDRESS: urlsplit(url).hostname})
        if trained:
            span.set(**{names.REQUEST_MODEL: attempt.model})
            span.name = attempt.model
        return client, request

    def _other(self, url: Any, headers: Mapping[str, str], body: Mapping[str, Json]) -> Any:
        """Return a request with another body. Its length is computed again."""
        self._asked = dumps(body)
        told = {name: value for name, value in headers.items() if name.lower() not in {"content-length", "host"}}
        extensions = self._request.extensions
        return self._library.Request("POST", url, headers=told, content=self._asked, extensions=extensions)

    def sent_on(self, response: Any) -> bool:
        """Whether the gateway left a replayed call to the program's own endpoint, where it must be sent now."""
        if self.span.attributes.get(names.REROUTED) and reroute.is_left(response.status_code, response.headers):
            self.span.attributes.pop(names.REROUTED)
            self._asked = self._request.content
            return True
        return False

    @property
    def own(self) -> tuple[Any, Any]:
        """The program's client and request."""
        return self._client, self._request

    def reads_first(self, response: Any) -> bool:  # noqa: ARG002 - its subclass looks at it
        """Whether to read a response before processing it."""
        return False

    def responded(self, response: Any) -> Any:
        """Take the answer. End the span if it is complete. Return what the program gets."""
        if self.span.end_ns is not None:  # recording has stopped since
            return response
        try:
            self._status = response.status_code
            self._events = response.headers.get("content-type", "").startswith("text/event-stream")
            if response.is_stream_consumed:
                self._recorded, self._to_end = RecordedBody([response.content]), True
                self.end_left()
            else:
                self._recorded = record_body(response, self)
        except Exception as error:  # noqa: BLE001 - logged
            log_failure(PLUGIN, error, self.span)
        return response

    def failed(self, error: BaseException) -> None:
        """End the span of a call that raised."""
        if self.span.end_ns is None:
            with self._recorder.guard(PLUGIN, self.span):
                self._end(error)

    def read_to_end(self) -> None:
        """Note that the body is complete."""
        self._to_end = True

    def read_failed(self, error: BaseException) -> None:
        """Note that reading failed."""
        self.failed(error)

    def closed(self) -> None:
        """End the span because nobody reads the rest. The garbage collector may call this; see `abandoned`."""
        if self.span.end_ns is not None:
            return
        if self._to_end:
            self.end_left()
        else:
            abandoned.take(self.end_left)

    def end_left(self) -> None:
        """End the span with what was read."""
        if self.span.end_ns is None:
            with self._recorder.guard(PLUGIN, self.span):
                self._end(self._refusal() if self._status >= 400 else None)

    def leave(self) -> None:
        """Leave the span to the parent of a forked child. In the child it counts as ended."""
        self.span.end_ns = self.span.start_ns

    def _refusal(self) -> str:
        self.span.set(**{"http.response.status_code": self._status, names.ERROR_TYPE: str(self._status)})
        text = "" if self._recorded is None else body_of(self._recorded)
        return f"HTTP {self._status}: {text[:500]}"

    def _end(self, error: BaseException | str | None) -> None:
        unfinished.discard(self)
        if self._recorded is not None:
            self._chunks = len(self._recorded.chunks)
        left = error is None or isinstance(error, asyncio.CancelledError)
        self._client = self._request = None
        self._body = {}
        self.span.end(error=error, later=lambda: self._told(left=left))

    def _told(self, *, left: bool) -> None:
        """Add the attributes of request and answer."""
        told = self.span.attributes
        told[names.REQUEST] = self._request_text()
        if self._recorded is None:
            if self.span.status == "ok":
                told[names.ABANDONED] = True  # recording stopped before the answer arrived
            return
        text, response, whole = self._read_answer(body_of(self._recorded, self._chunks))
        if left and not whole:
            told[names.ABANDONED] = True
        if text:
            told[names.RESPONSE] = text
        told.update(response_attributes(self._endpoint, response or {}))

    def _request_text(self) -> str:
        return self._asked.decode()

    def _read_answer(self, text: str) -> tuple[str, Mapping[str, Json] | None, bool]:
        """Return an answer as text and as data, and whether it is complete."""
        if not self._events:
            return text, read_object(text), self._to_end
        found = read_events(text)
        response = self._put_together(found.found)
        whole = self._to_end or found.done or is_whole(self._endpoint, response)
        return "" if response is None else dumps(response).decode(), response, whole

    def _put_together(self, events: list[dict[str, Json]]) -> dict[str, Json] | None:
        if self._endpoint == MESSAGES:
            return message_of_events(events) if events else None
        return put_together(self._endpoint, events)


def _library(client: Any) -> ModuleType:
    """Return a client's library: httpx or httpx2."""
    roots = (kind.__module__.partition(".")[0] for kind in type(client).__mro__)
    return next(sys.modules[root] for root in roots if root in {"httpx", "httpx2"})
