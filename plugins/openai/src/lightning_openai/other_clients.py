"""Calls of models that are reached without the openai client: a framework's own event makes their chat span."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeVar

from lightning_openai.attributes import request_attributes, response_attributes
from lightning_openai.foreign.begin import unaskable_in
from lightning_openai.json_text import to_json
from lightning_openai.reroute import ASKS, LEFT, agent_header
from lightning_spans.record.context import current, current_attempt, entered, entered_iteration, entered_steps, settled
from lightning_spans.record.instrument.scope import Scope, scoped, scopes_around
from lightning_spans.schema import spans as names
from lightning_spans.schema.spans import Json

if TYPE_CHECKING:
    from opentelemetry.context import Context

    from lightning_spans.hooks import OpenSpan, Recorder

logger = logging.getLogger("lightning_spans")
T = TypeVar("T")
NOT_ASKED: Final[Mapping[str, Json]] = {}  # in place of an answer: it came from a cache
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
    if isinstance(error, GeneratorExit):  # its reader left
        bodies[names.ABANDONED], error = True, None
    told = {} if response is None else response_attributes(endpoint, response)
    status = getattr(error, "status_code", None)
    if isinstance(status, int):
        told = {**told, "http.response.status_code": status}
    span.end(error=error, attributes={names.ENDPOINT: endpoint, **bodies, **told})


def _tell(recorder: Recorder, span: OpenSpan, framework: str) -> None:
    """Say that an agent which is to be trained can't be."""
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
    """A call of a model by whatever client: its chat span, unless the patched client makes one meanwhile.

    A request that it sends to the gateway names the span (`mark`), so that the gateway's tokens join it.

    Args:
        recorder: takes the span.
        plugin: the package that follows, for what is logged.
        framework: what reports the call.
        ask: gives what is asked as the body of a request to `endpoint`.
        at_once: ask now, since messages may change; else when the span is made.
        provider: who serves the model, where known.
        streamed: whether the answer is streamed.
        endpoint: whose format the bodies have: ``/chat/completions`` or ``/responses``.
        place: gives the context for the span; called where the call begins.
        scope: what the plugin enters while the call lasts; one of its own by default.
        known: attributes of the span.
        leads: whether a replay's gateway is asked first, in place of the program's own endpoint.
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
        place: Callable[[], Context] = settled,
        scope: Scope | None = None,
        known: Mapping[str, Json] | None = None,
        leads: bool = False,
    ) -> None:
        self.leads, self.provider = leads, provider
        self.left = False  # the openai client was told by the gateway to ask the program's own endpoint
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
        self._outer = settled()
        self._start_ns = time.time_ns()
        self._span: OpenSpan | None = None  # begun before the end where a request names it
        self._ask = ask
        self._request: Mapping[str, Json] | None = None
        if at_once:
            with recorder.guard(plugin):
                self._request = {}  # where it fails
                self._request = ask()

    @property
    def named(self) -> bool:
        """Whether a request to the gateway has named the span, which is then to be ended in any case."""
        return self._span is not None

    async def asked(self, work: Awaitable[T], body: Callable[[T], Mapping[str, Json] | None]) -> T:
        """Await the answer; `body` gives it as a chat completion, None where it is none, or `NOT_ASKED`."""
        try:
            with entered(scoped(self.scope)):
                answer = await work
        except BaseException as error:
            self.end(error=error)
            raise
        self.end(lambda: body(answer))
        return answer

    async def steps(
        self, items: AsyncGenerator[T, None], body: Callable[[T], Mapping[str, Json] | None]
    ) -> AsyncGenerator[T, None]:
        """Return the items of an answer that is streamed; `body`, as of `asked`, gets the last."""
        last: list[T] = []
        failed: BaseException | None = None
        steps = entered_steps(scoped(self.scope, current()), items)
        try:
            async for item in steps:
                last = [item]
                yield item
        except GeneratorExit:
            raise
        except BaseException as error:
            failed = error
            raise
        finally:
            await steps.aclose()
            self.end((lambda: body(last[0])) if last and failed is None else None, error=failed)

    def called(self, work: Callable[[], T], body: Callable[[T], Mapping[str, Json] | None]) -> T:
        """As `asked`, of an answer that is not awaited."""
        try:
            with entered(scoped(self.scope)):
                answer = work()
        except BaseException as error:
            self.end(error=error)
            raise
        self.end(lambda: body(answer))
        return answer

    def iterate(
        self, items: Generator[T, None, None], body: Callable[[T], Mapping[str, Json] | None]
    ) -> Generator[T, None, None]:
        """As `steps`, of a generator that is not asynchronous."""
        last: list[T] = []
        failed: BaseException | None = None
        steps = entered_iteration(scoped(self.scope, current()), items)
        try:
            for item in steps:
                last = [item]
                yield item
        except GeneratorExit:
            raise
        except BaseException as error:
            failed = error
            raise
        finally:
            steps.close()
            self.end((lambda: body(last[0])) if last and failed is None else None, error=failed)

    def end(
        self,
        answer: Callable[[], Mapping[str, Json] | None] | None = None,
        *,
        error: BaseException | str | None = None,
    ) -> None:
        """Make the span, unless the patched client or a call inside of this one did.

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
            self.scope.call_began()  # what is around this one made no call of its own
            span = self._span
            if span is None:
                span = self._begin()
                _tell(self._recorder, span, self._framework)
            _end(span, self._endpoint, self._asks(), response, error)

    def is_left(self, error: BaseException) -> bool:
        """Whether the gateway leaves a call that leads to it to the program's own endpoint: that makes the span."""
        if not self.leads or not (self.left or LEFT in str(error)):
            return False
        if self._span is not None:
            self._span.end_ns = self._span.start_ns  # so that nothing ends it
        return True

    def begin(self) -> None:
        """Begin the span: there is no other of this call, and it is to be ended in any case."""
        with self._recorder.guard(self._plugin):
            if self._span is None:
                self._span = self._begin()
            self.scope.call_began()

    def _begin(self) -> OpenSpan:
        with entered(self._outer):
            context = self._place()
        return _begin(self._recorder, self._asks(), self._known, context, self._start_ns)

    def _asks(self) -> Mapping[str, Json]:
        if self._request is None:
            self._request = self._ask()
        return self._request

    def is_reroutable(self, unaskable: list[str]) -> None:
        """Note that the call is sent in a way that would be led to a policy, and which of its fields none is asked."""
        self._known |= {names.REROUTABLE: True, names.UNASKABLE: unaskable or None}

    def name(self, request: Any) -> None:
        """Name the span in a request to the gateway of its attempt; any other is left as it is."""
        with self._recorder.guard(self._plugin, self._span):
            unaskable = unaskable_in(request)
            if unaskable is not None:
                self.is_reroutable(unaskable)
            attempt = current_attempt(self._outer)
            if attempt is None or not attempt.endpoint or not str(request.url).startswith(f"{attempt.endpoint}/"):
                return
            if self.scope.seen or "traceparent" in request.headers:  # the patched client's
                return
            if self._span is None:
                self._span = self._begin()
            request.headers["traceparent"] = self._span.traceparent
            request.headers.update(agent_header(self._span.path))
            if self.leads:
                request.headers.update(ASKS)


def mark(request: Any) -> None:
    """Have the call that this HTTP request is part of name its span in it, if it goes to the gateway."""
    for scope in scopes_around():
        if scope.call is not None:
            scope.call.name(request)
            return
