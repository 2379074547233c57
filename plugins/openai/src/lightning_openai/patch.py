"""The patch of the openai client: every model call made with it is one chat span, whoever makes the call.

The client is patched where every request passes: `request` (which contains the retry loop, so that one call is one
span), `_process_response` (which has the unparsed answer), and the two generators that read event streams. These are
methods of the base classes, so existing clients are patched too.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final

from openai._base_client import AsyncAPIClient, AsyncHttpxClientWrapper, SyncAPIClient
from openai._streaming import AsyncStream, Stream
from opentelemetry.instrumentation.instrumentor import BaseInstrumentor  # type: ignore[attr-defined]

from lightning_openai import reroute
from lightning_openai.call import PLUGIN, ModelCall, endpoint_of
from lightning_openai.foreign import google_aiohttp
from lightning_openai.httpx.collected import wrap_del
from lightning_openai.httpx.sends import HttpxSends, is_sending
from lightning_openai.litellm import calls as litellm_calls
from lightning_openai.other_clients import mark
from lightning_openai.reading.abandoned import abandoned
from lightning_openai.reading.unfinished import unfinished
from lightning_spans.record.instrument.patches import Undo, clear, put_back, replace, replace_in_subclasses
from lightning_spans.record.instrument.scope import scopes_around
from lightning_spans.record.process import in_child
from lightning_spans.record.recorder import log_failure
from lightning_spans.record.unrecorded import watch

if TYPE_CHECKING:
    from lightning_spans.hooks import Recorder

logger = logging.getLogger("lightning_spans")
_lock = threading.Lock()
_recorders: list[Recorder] = []
_undo_patches = Undo()
# The call that a response belongs to, between `request` and `_process_response` of the same task.
_current: ContextVar[ModelCall | None] = ContextVar("lightning_openai_call", default=None)


def bind(recorder: Recorder) -> Callable[[], None]:
    """Report every model call to this recorder until the returned function is called.

    Several frameworks may bind. They share one patch, which only the last undo removes.
    """
    with _lock:
        if not _recorders:
            _clear()
            for owner, name, wrap in (*_PATCHES, *_httpx.places()):
                put = replace_in_subclasses if name == "request" else replace
                _undo_patches.add(put(owner, name, wrap))
            _undo_patches.add(replace(BaseInstrumentor, "uninstrument", _wrap_uninstrument))
            _undo_patches.add(watch(_is_recorded))
            for follow in (litellm_calls.follow, google_aiohttp.follow):
                _undo_patches.add(follow(lambda: _recorders[-1] if _recorders else None))
            abandoned.start()
            atexit.register(_end_unfinished)
        _recorders.append(recorder)

    undo = Undo()
    undo.add(lambda: _unbind(recorder))
    return undo


def _unbind(recorder: Recorder) -> None:
    with _lock:
        _recorders.remove(recorder)
        if not _recorders:
            _undo_patches()
            _clear()
            abandoned.stop()
            _end_unfinished()
            atexit.unregister(_end_unfinished)
            reroute.forget()


def _clear() -> None:
    for owner, name, _ in _PATCHES:
        if name == "request":
            clear(owner, name)


def _put_back() -> bool:
    """Patch again if another library removed the patch; return whether it had."""
    with _lock:
        again = [put_back(owner, name, wrap) for owner, name, wrap in _PATCHES if name == "request" and _recorders]
        for undo in again:
            _undo_patches.add(undo)
    return any(again)


def _wrap_uninstrument(original: Callable[..., Any]) -> Callable[..., Any]:
    """Restore the patches after an instrumentor has put back what it found, which may predate them."""

    def uninstrument(instrumentor: Any, **options: Any) -> Any:
        try:
            return original(instrumentor, **options)
        finally:
            _put_back()

    return uninstrument


def _end_unfinished() -> None:
    for call in list(unfinished):
        call.end_left()


def _after_fork() -> None:
    """Leave calls to the parent process: the child drops its copies of the answers, which means nothing."""
    global _lock  # noqa: PLW0603 - another thread of the parent's may hold it
    _lock = threading.Lock()
    while unfinished:
        unfinished.pop().leave()


in_child(_after_fork)


def _begin(client: Any, options: Any, streamed: object, method: Any) -> ModelCall | None:
    """Start the span of a model call; None for any other request, and while nothing is attached."""
    recorder = _recorders[-1] if _recorders else None
    endpoint = endpoint_of(options.method, str(options.url))
    if recorder is None:
        with _lock:
            if not _recorders:  # another library put back one of our wrappers that it had found: see `patches.clear`
                _clear()
        return None
    if endpoint is None:
        return None
    try:
        call = ModelCall(recorder, client, options, endpoint, method, streamed=bool(streamed))
    except Exception as error:  # noqa: BLE001 - logged
        log_failure(PLUGIN, error)
        return None
    unfinished.add(call)
    return call


# A request that the current call `covers` is already recorded: the patch is in a class and in its parent, perhaps with
# another library's patch in between. Other libraries patch `OpenAI`, not its base class, so subclasses are patched too;
# such patches may be descriptors that must be bound. A user's own subclass may define `request` too: it is called on
# the user's client, and the request that it passes on to the base class is sent to the call's destination.


def _wrap_request(original: Callable[..., Any]) -> Callable[..., Any]:
    sends = not _is_of_subclass(original)

    def request(self: Any, cast_to: Any, options: Any, **kwargs: Any) -> Any:
        def ask(client: Any, given: Any) -> Any:
            return original.__get__(client)(cast_to, given, **kwargs)

        outer = _current.get()
        if outer is not None and outer.covers(self, options, original):
            return _send(outer, self, options, ask) if sends else ask(self, options)
        call = _begin(self, options, kwargs.get("stream"), original)
        _current.set(call)
        try:
            if call is None:
                return original.__get__(self)(cast_to, options, **kwargs)
            answer = _send(call, self, options, ask) if sends else ask(self, options)
        except BaseException as error:
            if call is not None:
                call.failed(error)
            raise
        finally:
            _current.set(outer)  # a token would not work: a coroutine may be closed in another context
        call.returned()
        return answer

    return request


def _send(call: ModelCall, client: Any, options: Any, ask: Callable[[Any, Any], Any]) -> Any:
    """Send a call to its destination. A replayed call that is not in the record then goes to the program's endpoint."""
    sender, given = call.sent_by(client, options)
    try:
        return ask(sender, given)
    except Exception as error:
        own = call.sent_on(error, options)
        if own is None:
            reroute.raise_unanswered(error)
            raise
    return ask(*own)


async def _asend(call: ModelCall, client: Any, options: Any, ask: Callable[[Any, Any], Any]) -> Any:
    """Send a call asynchronously; see `_send`."""
    sender, given = call.sent_by(client, options)
    try:
        return await ask(sender, given)
    except Exception as error:
        own = call.sent_on(error, options)
        if own is None:
            reroute.raise_unanswered(error)
            raise
    return await ask(*own)


def _wrap_async_request(original: Callable[..., Any]) -> Callable[..., Any]:
    sends = not _is_of_subclass(original)

    async def request(self: Any, cast_to: Any, options: Any, **kwargs: Any) -> Any:
        def ask(client: Any, given: Any) -> Any:
            return original.__get__(client)(cast_to, given, **kwargs)

        outer = _current.get()
        if outer is not None and outer.covers(self, options, original):
            return await (_asend(outer, self, options, ask) if sends else ask(self, options))
        call = _begin(self, options, kwargs.get("stream"), original)
        _current.set(call)
        try:
            if call is None:
                return await original.__get__(self)(cast_to, options, **kwargs)
            answer = await (_asend(call, self, options, ask) if sends else ask(self, options))
        except BaseException as error:
            if call is not None:
                call.failed(error)
            raise
        finally:
            _current.set(outer)  # a token would not work: a coroutine may be closed in another context
        call.returned()
        return answer

    return request


def _is_of_subclass(method: Any) -> bool:
    """Whether a method is defined in a subclass, so that it needs an object of that class."""
    kind, _, name = str(getattr(method, "__qualname__", "")).rpartition(".")
    return name == "request" and kind.rpartition(".")[2] not in {"", "<locals>", "SyncAPIClient", "AsyncAPIClient"}


def _wrap_process_response(original: Callable[..., Any]) -> Callable[..., Any]:
    def process_response(self: Any, *, response: Any, **kwargs: Any) -> Any:
        call = _current.get()
        if call is not None:
            call.responded(response, kwargs.get("retries_taken"))
        elif _recorders and endpoint_of(kwargs["options"].method, str(kwargs["options"].url)) and _put_back():
            logger.warning(
                "lightning: other code removed our patch from %s; a call is not recorded", type(self).__name__
            )
        return original(self, response=response, **kwargs)

    return process_response


def _wrap_stream(original: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    def stream(self: Any) -> Iterator[Any]:
        call = self.response.extensions.get(PLUGIN)
        if call is None:
            return original(self)
        call.events = 0
        return _watch_items(original(self), call)

    return stream


def _watch_items(items: Iterator[Any], call: ModelCall) -> Iterator[Any]:
    taken = 0
    try:
        call.state = call.state.requested
        for item in items:
            call.state = call.state.received
            taken += 1
            call.events, call.seen_ns = taken, time.time_ns()
            yield item
            call.state = call.state.requested
        call.read_to_end()
    except GeneratorExit:
        raise  # the agent stopped reading
    except BaseException as error:
        call.failed(error)
        raise
    finally:
        call.state = call.state.received
        call.closed()


def _wrap_async_stream(original: Callable[..., AsyncIterator[Any]]) -> Callable[..., AsyncIterator[Any]]:
    def stream(self: Any) -> AsyncIterator[Any]:
        call = self.response.extensions.get(PLUGIN)
        if call is None:
            return original(self)
        call.events = 0
        return _awatch_items(original(self), call)

    return stream


async def _awatch_items(items: Any, call: ModelCall) -> AsyncIterator[Any]:
    taken = 0
    try:
        call.state = call.state.requested
        async for item in items:
            call.state = call.state.received
            taken += 1
            call.events, call.seen_ns = taken, time.time_ns()
            yield item
            call.state = call.state.requested
        call.read_to_end()
    except GeneratorExit:
        raise
    except BaseException as error:
        call.failed(error)
        raise
    finally:
        call.state = call.state.received
        call.closed()


def _name(client: Any, request: Any) -> None:
    """Put the id of a model call's span into the HTTP request about to be sent for it."""
    call = _current.get()
    if call is not None and call.sends(client):
        call.name(request)
    else:
        mark(request)


def _is_recorded() -> bool:
    """Whether the current request is part of a call that has a span, or of a request that was counted."""
    return _is_by_openai() or is_sending() or any(scope.call is not None for scope in scopes_around())


def _is_by_openai() -> bool:
    """Whether the current request is part of a call of the openai client."""
    return _current.get() is not None


_httpx: Final = HttpxSends(lambda: _recorders[-1] if _recorders else None, _is_recorded, _is_by_openai, _name)
_PATCHES: Final[tuple[tuple[type, str, Callable[[Any], Any]], ...]] = (
    (SyncAPIClient, "request", _wrap_request),
    (AsyncAPIClient, "request", _wrap_async_request),
    (SyncAPIClient, "_process_response", _wrap_process_response),
    (AsyncAPIClient, "_process_response", _wrap_process_response),
    (Stream, "__stream__", _wrap_stream),
    (AsyncStream, "__stream__", _wrap_async_stream),
    (AsyncHttpxClientWrapper, "__del__", wrap_del),
)
