"""The methods with which httpx and httpx2 send requests: otherwise unrecorded calls are recorded or counted here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextvars import ContextVar
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from lightning_openai.call import PLUGIN
from lightning_openai.caller import caller_in
from lightning_openai.foreign.begin import begin_call
from lightning_openai.httpx.collected import note_loop
from lightning_openai.reroute import is_below
from lightning_spans.record.instrument.scope import place_of_call, scopes_around
from lightning_spans.record.recorder import log_failure
from lightning_spans.record.unrecorded import is_model_call, look

if TYPE_CHECKING:
    from lightning_openai.httpx.calls import HttpxCall
    from lightning_spans.hooks import Recorder

# Whether a client is sending a model call: its transport sends the same request. While other requests are sent, an app
# that runs in the client's transport may call models.
_sending: ContextVar[bool] = ContextVar("lightning_openai_sending", default=False)


def is_sending() -> bool:
    """Whether an httpx client is currently sending a model call."""
    return _sending.get()


class HttpxSends:
    """Patches the clients.

    Args:
        recorder: returns the recorder; None: nothing is recorded now.
        recorded: whether the current request is part of a call that has a span, or that was counted.
        by_openai: whether that call is the openai client's.
        name: puts the id of that call's span into a client's request.
    """

    def __init__(
        self,
        recorder: Callable[[], Recorder | None],
        recorded: Callable[[], bool],
        by_openai: Callable[[], bool],
        name: Callable[[Any, Any], None],
    ) -> None:
        self._recorder = recorder
        self._recorded = recorded
        self._by_openai = by_openai
        self._name = name

    def places(self) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
        """Return what to replace, and with what."""
        for library in ("httpx", "httpx2"):
            if find_spec(library) is not None:
                module = import_module(library)
                yield module.Client, "send", self._wrap
                yield module.AsyncClient, "send", self._wrap_async

    def _begin(self, client: Any, request: Any) -> HttpxCall | None:
        """Start the span of a request that has none; None if it is sent unchanged, perhaps counted."""
        recorder = self._recorder()
        call = None
        if recorder is not None and (not self._recorded() or self._takes_over(recorder, request)):
            call = begin_call(recorder, client, request)
        if call is None:
            self._name(client, request)
            look(self._recorded, request.method, lambda: (request.url.netloc.decode(), request.url.path))
        return call

    def _takes_over(self, recorder: Recorder, request: Any) -> bool:
        """Whether a call that a framework reports goes to a policy, so that its span is created here."""
        try:
            if is_sending() or self._by_openai() or not is_model_call(request.method, request.url.path):
                return False
            if any(scope.call is not None and scope.call.named for scope in scopes_around()):
                return False
            attempt = caller_in(place_of_call()).goes_to(recorder)
            return attempt is not None and not is_below(request.url, attempt.endpoint)
        except Exception as error:  # noqa: BLE001 - logged
            log_failure(PLUGIN, error)
            return False

    def _wrap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def follow(call: HttpxCall, client: Any, request: Any, options: dict[str, Any]) -> Any:
            refused = call.refused()
            if refused is not None:
                return refused
            sender, asked = call.sent_by()
            response = original(sender, asked, **_options(options, own=sender is client))
            if call.sent_on(response):
                response.close()
                response = original(*call.own, **options)
            elif sender is not client:
                response.request = request  # a client may use their headers to choose how the answer is sent
            if call.reads_first(response):
                response.read()
            return call.responded(response)

        def send(client: Any, request: Any, **options: Any) -> Any:
            if self._recorder() is None:
                return original(client, request, **options)
            call = self._begin(client, request)
            outer = _sending.get()
            _sending.set(outer or call is not None or is_model_call(request.method, request.url.path))
            try:
                return original(client, request, **options) if call is None else follow(call, client, request, options)
            except BaseException as error:
                if call is not None:
                    call.failed(error)
                raise
            finally:
                _sending.set(outer)  # a token would not work: a coroutine may be closed in another context

        return send

    def _wrap_async(self, original: Callable[..., Any]) -> Callable[..., Any]:
        async def follow(call: HttpxCall, client: Any, request: Any, options: dict[str, Any]) -> Any:
            refused = call.refused()
            if refused is not None:
                return refused
            sender, asked = call.sent_by()
            response = await original(sender, asked, **_options(options, own=sender is client))
            if call.sent_on(response):
                await response.aclose()
                response = await original(*call.own, **options)
            elif sender is not client:
                response.request = request
            if call.reads_first(response):
                await response.aread()
            return call.responded(response)

        async def send(client: Any, request: Any, **options: Any) -> Any:
            note_loop(client)
            if self._recorder() is None:
                return await original(client, request, **options)
            call = self._begin(client, request)
            outer = _sending.get()
            _sending.set(outer or call is not None or is_model_call(request.method, request.url.path))
            try:
                if call is None:
                    return await original(client, request, **options)
                return await follow(call, client, request, options)
            except BaseException as error:
                if call is not None:
                    call.failed(error)
                raise
            finally:
                _sending.set(outer)

        return send


def _options(options: dict[str, Any], *, own: bool) -> dict[str, Any]:
    """Return the options to send a request with. To the gateway, none that authenticates the user."""
    return options if own else {"stream": options.get("stream", False)}
