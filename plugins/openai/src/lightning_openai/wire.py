"""The wire: every model call made with the openai client is one chat span, whoever makes it.

The client is patched where every request passes: `request` (which holds the loop of retries, so that one call is one
span), `_process_response` (which has the answer as it came), and the two generators that read event streams. Clients
made before are patched too, since these are methods of the base classes.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakSet

from openai._base_client import AsyncAPIClient, SyncAPIClient
from openai._streaming import AsyncStream, Stream

from lightning_openai import gateway
from lightning_openai.call import PLUGIN, Call, endpoint_of
from lightning_openai.leftovers import leftovers
from lightning_spans.patches import Undo, replace, replace_in_subclasses

if TYPE_CHECKING:
    from lightning_spans.recorder import Recorder

_lock = threading.Lock()
_recorders: list[Recorder] = []
_undo_patches = Undo()
_unfinished: WeakSet[Call] = WeakSet()
# Which call a response belongs to, between `request` and `_process_response` of the same task.
_current: ContextVar[Call | None] = ContextVar("lightning_openai_call", default=None)


def bind(recorder: Recorder) -> Callable[[], None]:
    """Report every model call to this recorder, until the callable that is given back is called.

    Several frameworks may bind; they share one patch, and the first undo but the last leaves it in place.
    """
    with _lock:
        if not _recorders:
            for owner, name, wrap in _PATCHES:
                put = replace_in_subclasses if name == "request" else replace
                _undo_patches.add(put(owner, name, wrap))
            leftovers.start()
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
            leftovers.stop()
            _end_unfinished()
            atexit.unregister(_end_unfinished)
            gateway.forget()


def _end_unfinished() -> None:
    for call in list(_unfinished):
        call.end_left()


def _begin(client: Any, options: Any, streamed: object) -> Call | None:
    """Begin the span of a model call; None for any other request, and while nothing is attached."""
    recorder = _recorders[-1] if _recorders else None
    endpoint = endpoint_of(options.method, str(options.url))
    if recorder is None or endpoint is None:
        return None
    with recorder.guard(PLUGIN):
        return Call(recorder, client, options, endpoint, streamed=bool(streamed))
    return None


# Below, a call whose options are those of the current one is already being recorded: we are patched in twice, with
# somebody else's patch between. Others patch `OpenAI`, not its base, so subclasses are patched too; their patches may
# be descriptors that want to be bound.


def _wrap_request(original: Callable[..., Any]) -> Callable[..., Any]:
    def request(self: Any, cast_to: Any, options: Any, **kwargs: Any) -> Any:
        outer = _current.get()
        if outer is not None and outer.options is options:
            return original.__get__(self)(cast_to, options, **kwargs)
        call = _begin(self, options, kwargs.get("stream"))
        _current.set(call)
        try:
            if call is None:
                return original.__get__(self)(cast_to, options, **kwargs)
            answer = original.__get__(call.client)(cast_to, call.options, **kwargs)
        except BaseException as error:
            if call is not None:
                call.failed(error)
            raise
        finally:
            _current.set(outer)  # a token would not do: a coroutine may be closed in another context
        call.returned(answer)
        return answer

    return request


def _wrap_async_request(original: Callable[..., Any]) -> Callable[..., Any]:
    async def request(self: Any, cast_to: Any, options: Any, **kwargs: Any) -> Any:
        outer = _current.get()
        if outer is not None and outer.options is options:
            return await original.__get__(self)(cast_to, options, **kwargs)
        call = _begin(self, options, kwargs.get("stream"))
        _current.set(call)
        try:
            if call is None:
                return await original.__get__(self)(cast_to, options, **kwargs)
            answer = await original.__get__(call.client)(cast_to, call.options, **kwargs)
        except BaseException as error:
            if call is not None:
                call.failed(error)
            raise
        finally:
            _current.set(outer)  # a token would not do: a coroutine may be closed in another context
        call.returned(answer)
        return answer

    return request


def _wrap_process_response(original: Callable[..., Any]) -> Callable[..., Any]:
    def process_response(self: Any, *, response: Any, **kwargs: Any) -> Any:
        call = _current.get()
        if call is not None:
            call.responded(response)
            if call.pending:
                _unfinished.add(call)
        return original(self, response=response, **kwargs)

    return process_response


def _wrap_stream(original: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    def stream(self: Any) -> Iterator[Any]:
        call = self.response.extensions.get(PLUGIN)
        if call is None:
            return original(self)
        call.began()
        return _watched(original(self), call)

    return stream


def _watched(items: Iterator[Any], call: Call) -> Iterator[Any]:
    try:
        call.reading = True
        for item in items:
            call.took()
            yield item
            call.reading = True
        call.read_to_end()
    except GeneratorExit:
        raise  # the agent reads no further
    except BaseException as error:
        call.failed(error)
        raise
    finally:
        call.reading = False
        call.closed()


def _wrap_async_stream(original: Callable[..., AsyncIterator[Any]]) -> Callable[..., AsyncIterator[Any]]:
    def stream(self: Any) -> AsyncIterator[Any]:
        call = self.response.extensions.get(PLUGIN)
        if call is None:
            return original(self)
        call.began()
        return _awatched(original(self), call)

    return stream


async def _awatched(items: Any, call: Call) -> AsyncIterator[Any]:
    try:
        call.reading = True
        async for item in items:
            call.took()
            yield item
            call.reading = True
        call.read_to_end()
    except GeneratorExit:
        raise
    except BaseException as error:
        call.failed(error)
        raise
    finally:
        call.reading = False
        call.closed()


_PATCHES: Final = (
    (SyncAPIClient, "request", _wrap_request),
    (AsyncAPIClient, "request", _wrap_async_request),
    (SyncAPIClient, "_process_response", _wrap_process_response),
    (AsyncAPIClient, "_process_response", _wrap_process_response),
    (Stream, "__stream__", _wrap_stream),
    (AsyncStream, "__stream__", _wrap_async_stream),
)
