"""Chat spans for DSPy's own HTTP client (since 3.4), one per request.

DSPy ships a client, `lm15`, on the standard library's sockets and prefers it to LiteLLM. It is patched where a request
passes as bytes; each retry is a request of its own there. Calls of agents in training go to the gateway, with only the
body and the headers that state its format. In a replay, every call goes to the gateway first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Callable, Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from lightning_dspy import FRAMEWORK
from lightning_openai.attributes import request_attributes, response_attributes
from lightning_openai.call import endpoint_of
from lightning_openai.events import is_whole, read_events
from lightning_openai.reroute import is_left, own_headers
from lightning_spans.chat.stream import put_together
from lightning_spans.record.instrument.patches import replace
from lightning_spans.record.instrument.scope import current_scope, scopes_around
from lightning_spans.record.instrument.tracker import Tracker
from lightning_spans.record.prompts import with_prompts
from lightning_spans.record.unrecorded import look
from lightning_spans.schema import spans as names
from lightning_spans.schema.json import dumps, read_json, read_object

if TYPE_CHECKING:
    from lightning_spans.hooks import OpenSpan, Recorder
    from lightning_spans.schema.spans import Json

_LM15: Final = "dspy._vendor.lm15"
# headers that are forwarded to the gateway
_KEPT: Final = frozenset({"content-type", "accept", "accept-encoding", "user-agent"})


def bind(recorder: Recorder) -> Iterator[Callable[[], None]]:
    """Patch the client to record every request; what is yielded removes each patch."""
    if find_spec("dspy._vendor") is None or find_spec(_LM15) is None:
        return
    from dspy._vendor.lm15.transports import StdlibAsyncTransport, StdlibTransport

    requests = DspyRequests(recorder, FRAMEWORK)
    yield requests.stop
    yield replace(StdlibTransport, "stream", requests.wrap_stream)
    yield replace(StdlibAsyncTransport, "_do_stream", requests.wrap_async_stream)


class DspyRequests(Tracker):
    """Creates the chat spans of requests."""

    def wrap_stream(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the sending of a request."""

        def stream(transport: Any, request: Any) -> Any:
            call = self._begin(request)
            if call is None:
                return original(transport, request)
            try:
                response = original(transport, call.request)
                if call.sent_on(response):
                    response.close()
                    response = original(transport, call.request)
            except BaseException as error:
                call.end(error)
                raise
            response._chunks = call.read(response._chunks, response.status)
            response._release = call.released(response._release)
            return response

        return stream

    def wrap_async_stream(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the asynchronous sending of a request."""

        async def stream(transport: Any, request: Any) -> Any:
            call = self._begin(request)
            if call is None:
                return await original(transport, request)
            try:
                response = await original(transport, call.request)
                if call.sent_on(response):
                    await response.aclose()
                    response = await original(transport, call.request)
            except BaseException as error:
                call.end(error)
                raise
            response._chunks = call.aread(response._chunks, response.status)
            response._release = call.areleased(response._release)
            return response

        return stream

    def _begin(self, request: Any) -> _Request | None:
        """Start the span of a model call. Other requests that look like one are only counted."""
        if not self.live:
            return None
        with self.guard():
            endpoint = endpoint_of(request.method, request.url)
            if endpoint is not None:
                return _Request.begun(self, request, endpoint)
            where = urlsplit(request.url)
            known = any(scope.call is not None for scope in scopes_around())
            look(lambda: known, request.method, lambda: (where.netloc, where.path))
        return None


class _Request:
    """One request, until its answer has been read."""

    def __init__(self, tracker: DspyRequests, request: Any, span: OpenSpan, endpoint: str, *, streamed: bool) -> None:
        self.request = self._own = request  # what is sent, and what the program's own endpoint gets
        self._tracker = tracker
        self._span = span
        self._endpoint = endpoint
        self._streamed = streamed
        self._status = 200
        self._pieces: list[bytes] = []
        self._whole = False

    @classmethod
    def begun(cls, tracker: DspyRequests, request: Any, endpoint: str) -> _Request | None:
        """Start the span of a request and put its id into the request; None if it cannot begin."""
        body = read_json(request.body)
        scope = current_scope()
        context = None if scope is None else scope.call_begins()
        facts: dict[str, Json] = {
            names.PROVIDER: "openai",
            names.ENDPOINT: endpoint,
            names.STREAMED: bool(body.get("stream")),
            names.SERVER_ADDRESS: urlsplit(request.url).hostname,
            **request_attributes(body),
        }
        span = tracker.begin(names.CHAT, str(body.get("model", "chat")), context=context, attributes=facts)
        if span is None:
            return None
        if scope is not None:
            scope.call_began()
        call = cls(tracker, request, span, endpoint, streamed=bool(body.get("stream")))
        with tracker.guard(span):
            call._send(body)
        span.set(**{names.REQUEST: call.request.body.decode()})
        return call

    def _send(self, body: dict[str, Json]) -> None:
        """Put the span's id into the request, and send it to the gateway if its agent is in training.

        In a replay every call goes to the gateway first; see `sent_on`.
        """
        request, span, attempt = self.request, self._span, self._span.attempt
        prompted = with_prompts(body, span.path, attempt)
        body = dict(prompted) if prompted is not None else body
        headers = [*request.headers, ("traceparent", span.traceparent)]
        content = request.body if prompted is None else dumps(body)
        self.request = self._own = dataclasses.replace(request, headers=headers, body=content)
        trained = self._tracker.recorder.reroutes(span)
        if attempt is None or attempt.endpoint is None or not (trained or attempt.replay is not None):
            return
        if trained:
            body = {**body, "model": attempt.model}
            span.set(**{names.REQUEST_MODEL: attempt.model})
            span.name = attempt.model
        headers = [pair for pair in request.headers if pair[0].lower() in _KEPT]
        headers += own_headers(attempt, span).items()
        url = f"{attempt.endpoint}/v1{self._endpoint}"
        self.request = dataclasses.replace(request, url=url, headers=headers, body=dumps(body))
        span.set(**{names.REROUTED: True})

    def sent_on(self, response: Any) -> bool:
        """Whether the gateway left a replayed call to the program's own endpoint, where it must be sent now."""
        headers = {name.lower(): value for name, value in response.headers}
        if self._span.attributes.get(names.REROUTED) and is_left(response.status, headers):
            self.request = self._own
            self._span.attributes.pop(names.REROUTED)
            self._span.set(**{names.REQUEST: self.request.body.decode()})
            return True
        return False

    def read(self, pieces: Iterator[bytes], status: int) -> Iterator[bytes]:
        """Return the parts of a body, and record them."""
        self._status = status
        try:
            for piece in pieces:
                self._pieces.append(piece)
                yield piece
            self._whole = True
        except Exception as error:
            self.end(error)
            raise

    async def aread(self, pieces: AsyncIterator[bytes], status: int) -> AsyncIterator[bytes]:
        """Return the parts of a body, and record them."""
        self._status = status
        try:
            async for piece in pieces:
                self._pieces.append(piece)
                yield piece
            self._whole = True
        except Exception as error:
            self.end(error)
            raise

    def released(self, original: Callable[[bool], Any]) -> Callable[[bool], Any]:
        """Return a release method that also ends the span: the answer has been read or abandoned."""

        def release(body_consumed: bool) -> Any:
            self.end()
            return original(body_consumed)

        return release

    def areleased(self, original: Callable[[bool], Any]) -> Callable[[bool], Any]:
        """Return an asynchronous release method that also ends the span."""

        async def release(body_consumed: bool) -> Any:
            self.end()
            return await original(body_consumed)

        return release

    def end(self, error: BaseException | None = None) -> None:
        """End the span with what was read."""
        if self._span.end_ns is not None:
            return
        with self._tracker.guard(self._span):
            refused = self._status >= 400
            if refused:
                self._span.set(**{"http.response.status_code": self._status, names.ERROR_TYPE: str(self._status)})
            text = b"".join(self._pieces).decode(errors="replace")
            self._tell(text)
            self._tracker.end(self._span, error=error or (f"HTTP {self._status}: {text[:500]}" if refused else None))

    def _tell(self, text: str) -> None:
        """Record what the answer says."""
        told: dict[str, Json] = {}
        response: dict[str, Json] | None = None
        whole = self._whole
        if self._streamed and self._status < 400:
            events = read_events(text)
            response = put_together(self._endpoint, events.found)
            whole = whole or events.done or is_whole(self._endpoint, response)
            told[names.RESPONSE] = None if response is None else dumps(response).decode()
        elif self._pieces:
            told[names.RESPONSE] = text
            response = read_object(text)
        if not whole:
            told[names.ABANDONED] = True
        self._span.set(**told, **response_attributes(self._endpoint, response or {}))
