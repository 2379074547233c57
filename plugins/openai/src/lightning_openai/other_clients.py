"""Chat spans for models called without the openai client, created from a framework's own events."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, TypeVar

from lightning_openai.attributes import request_attributes, response_attributes
from lightning_openai.foreign.begin import unaskable_in
from lightning_openai.json_text import to_json
from lightning_openai.reroute import ASKS, LEFT, SPAN_HEADER, agent_header, is_below
from lightning_spans.record.context import (
    current,
    current_attempt,
    entered_iteration,
    entered_steps,
    settle_context,
    use_context,
)
from lightning_spans.record.instrument.scope import Scope, scopes_around, with_scope
from lightning_spans.schema import spans as names
from lightning_spans.schema.spans import Json

if TYPE_CHECKING:
    from opentelemetry.context import Context

    from lightning_spans.hooks import OpenSpan, Recorder

logger = logging.getLogger("lightning_spans")
T = TypeVar("T")
NOT_ASKED: Final[Mapping[str, Json]] = {}  # instead of an answer: it came from a cache
_told: Final[set[str]] = set()


def _begin(
    recorder: Recorder,
    request: Mapping[str, Json],
    known: Mapping[str, Json],
    context: Context | None,
    start_ns: int | None,
) -> OpenSpan:
    told = request_attributes(request)
    name = told.get(names.REQUEST_MODEL, "chat")
    return recorder.start(names.CHAT, name, context=context, start_ns=start_ns, attributes={**known, **told})


def _end(
    span: OpenSpan,
    endpoint: str,
    request: Mapping[str, Json],
    response: Mapping[str, Json] | None,
    error: BaseException | str | None,
) -> None:
    bodies: dict[str, Json] = {names.REQUEST: to_json(request)}
    if response is not None:
        bodies[names.RESPONSE] = to_json(response)
    if isinstance(error, GeneratorExit):  # its reader stopped
        bodies[names.ABANDONED], error = True, None
    told = {} if response is None else response_attributes(endpoint, response)
    status = getattr(error, "status_code", None)
    if isinstance(status, int):
        told = {**told, "http.response.status_code": status}
    span.end(error=error, attributes={names.ENDPOINT: endpoint, **bodies, **told})


def _tell(recorder: Recorder, span: OpenSpan, framework: str) -> None:
    """Report that an agent cannot be trained although it should be."""
    if span.agent is not None and recorder.reroutes(span) and span.agent not in _told:
        _told.add(span.agent)
        logger.warning(
            "lightning: agent %r is to be trained, but %s reaches its model %r without the openai client's HTTP calls, "
            "so its calls go where they went and have no tokens. Give the agent an OpenAI-compatible client over HTTP.",
            span.agent,
            framework,
            span.name,
        )


class OtherCall:
    """A model call through any client: its chat span, unless the patched client creates one meanwhile.

    A request that it sends to the gateway carries the span's id (`mark`), so that the gateway's tokens join it.

    Args:
        recorder: receives the span.
        plugin: the package that reports, for log messages.
        framework: the framework that reports the call.
        ask: returns the request as a body for `endpoint`.
        at_once: call `ask` now, because messages may change; otherwise when the span is created.
        provider: the model's provider, if known.
        streamed: whether the answer is streamed.
        endpoint: the format of the bodies: ``/chat/completions`` or ``/responses``.
        place: returns the context for the span; called where the call begins.
        scope: entered by the plugin while the call lasts; a new one by default.
        known: attributes of the span.
        leads: whether a replay's gateway is asked first, instead of the program's own endpoint.
    """

    def __init__(
        self,
        recorder: Recorder,
        plugin: str,
        framework: str,
        ask: Callable[[], Mapping[str, Json]],
        *,
        at_once: bool = True,
        provider: str | None = None,
        streamed: bool = False,
        endpoint: str = "/chat/completions",
        place: Callable[[], Context] = settle_context,
        scope: Scope | None = None,
        known: Mapping[str, Json] | None = None,
        leads: bool = False,
    ) -> None:
        self.leads, self.provider = leads, provider
        self.left = False  # the gateway told the openai client to use the program's own endpoint
        self.scope = Scope() if scope is None else scope
        self.scope.call = self
        self._recorder = recorder
        self._plugin = plugin
        self._framework = framework
        self._endpoint = endpoint
        self._known: dict[str, Json] = {
            names.FRAMEWORK: framework,
            names.PROVIDER: provider,
            names.STREAMED: streamed,
            **(known or {}),
        }
        self._place = place
        self._outer = settle_context()
        self._start_ns = time.time_ns()
        self._span: OpenSpan | None = None  # begun before the end if a request carries its id
        self._ask = ask
        self._request: Mapping[str, Json] | None = None
        if at_once:
            with recorder.guard(plugin):
                self._request = {}  # if it fails
                self._request = ask()

    @property
    def named(self) -> bool:
        """Whether a request to the gateway carries the span's id. Then the span must be ended in any case."""
        return self._span is not None

    @contextmanager
    def start_inside(self) -> Iterator[None]:
        """Enter the call's scope for a block that starts the call. If the block raises, the call has failed."""
        try:
            with use_context(with_scope(self.scope)):
                yield
        except BaseException as error:
            self.end(error=error)
            raise

    async def asked(self, work: Awaitable[T], body: Callable[[T], Mapping[str, Json] | None]) -> T:
        """Await the answer. `body` returns it as a chat completion, None if it is none, or `NOT_ASKED`."""
        with self.start_inside():
            answer = await work
        self.end(lambda: body(answer))
        return answer

    async def steps(
        self,
        items: AsyncGenerator[T, None],
        body: Callable[[Sequence[T]], Mapping[str, Json] | None],
        *,
        kept: int | None = 1,
    ) -> AsyncGenerator[T, None]:
        """Return the items of a streamed answer. `body`, as in `asked`, gets the last `kept` of them, or all."""
        seen = deque[T](maxlen=kept)
        steps = entered_steps(with_scope(self.scope, current()), items)
        with self.end_after(lambda: body(seen) if seen else None):
            try:
                async for item in steps:
                    seen.append(item)
                    yield item
            finally:
                await steps.aclose()

    def called(self, work: Callable[[], T], body: Callable[[T], Mapping[str, Json] | None]) -> T:
        """Call synchronously; see `asked`."""
        with self.start_inside():
            answer = work()
        self.end(lambda: body(answer))
        return answer

    def iterate(
        self,
        items: Generator[T, None, None],
        body: Callable[[Sequence[T]], Mapping[str, Json] | None],
        *,
        kept: int | None = 1,
    ) -> Generator[T, None, None]:
        """Return the items of a synchronous generator; see `steps`."""
        seen = deque[T](maxlen=kept)
        steps = entered_iteration(with_scope(self.scope, current()), items)
        with self.end_after(lambda: body(seen) if seen else None):
            try:
                for item in steps:
                    seen.append(item)
                    yield item
            finally:
                steps.close()

    @contextmanager
    def end_after(self, answer: Callable[[], Mapping[str, Json] | None]) -> Iterator[None]:
        """End the call after a block that reads a streamed answer, with that answer or with the block's error.

        If the reader stops early, the call has the answer so far. `answer` is as in `end`.
        """
        failed: BaseException | None = None
        try:
            yield
        except GeneratorExit:
            raise
        except BaseException as error:
            failed = error
            raise
        finally:
            self.end(answer if failed is None else None, error=failed)

    def end(
        self,
        answer: Callable[[], Mapping[str, Json] | None] | None = None,
        *,
        error: BaseException | str | None = None,
    ) -> None:
        """Create the span, unless the patched client or a nested call did.

        Args:
            answer: as `body` of `asked`; None: there was no answer.
            error: what went wrong.
        """
        if self.scope.seen and self._span is None:
            return
        with self._recorder.guard(self._plugin, self._span):
            response = None if answer is None else answer()
            if response is NOT_ASKED and self._span is None:
                return
            self.scope.call_began()  # the surrounding call made no call of its own
            span = self._span
            if span is None:
                span = self._begin()
                _tell(self._recorder, span, self._framework)
            _end(span, self._endpoint, self._asks(), response, error)

    def is_left(self, error: BaseException) -> bool:
        """Whether the gateway leaves a call to the program's own endpoint. That call creates the span."""
        if not self.leads or not (self.left or LEFT in str(error)):
            return False
        if self._span is not None:
            self._span.end_ns = self._span.start_ns  # so that nothing ends it
        return True

    def begin(self) -> None:
        """Start the span. The call has no other, and this one must be ended in any case."""
        with self._recorder.guard(self._plugin):
            if self._span is None:
                self._span = self._begin()
            self.scope.call_began()

    def _begin(self) -> OpenSpan:
        with use_context(self._outer):
            context = self._place()
        return _begin(self._recorder, self._asks(), self._known, context, self._start_ns)

    def _asks(self) -> Mapping[str, Json]:
        if self._request is None:
            self._request = self._ask()
        return self._request

    def is_reroutable(self, unaskable: list[str]) -> None:
        """Note that the call could be sent to a policy, and which of its fields no policy supports."""
        self._known |= {names.REROUTABLE: True, names.UNASKABLE: unaskable or None}

    def name(self, request: Any) -> None:
        """Put the span's id into a request to its attempt's gateway. Other requests are left as they are."""
        with self._recorder.guard(self._plugin, self._span):
            unaskable = unaskable_in(request)
            if unaskable is not None:
                self.is_reroutable(unaskable)
            attempt = current_attempt(self._outer)
            if attempt is None or not is_below(request.url, attempt.endpoint):
                return
            if self.scope.seen or SPAN_HEADER in request.headers:  # the patched client's
                return
            if self._span is None:
                self._span = self._begin()
            request.headers.setdefault("traceparent", self._span.traceparent)
            request.headers.update({SPAN_HEADER: self._span.traceparent, **agent_header(self._span.path)})
            if self.leads:
                request.headers.update(ASKS)


def mark(request: Any) -> None:
    """Put the span's id of the current call into this HTTP request, if it goes to the gateway."""
    for scope in scopes_around():
        if scope.call is not None:
            scope.call.name(request)
            return
