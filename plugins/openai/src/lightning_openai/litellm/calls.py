"""Calls made with LiteLLM through any of its providers. Most providers send HTTP themselves, without a known client.

LiteLLM's functions are wrapped by its decorator `client`, which adds caching, retries and logging; the function itself
chooses the provider. The patch replaces the function inside the decorator, which also works for names that were
imported before.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from lightning_openai.caller import caller_in
from lightning_openai.litellm.routes import (
    LeftToOwnEndpointError,
    asks_first,
    led_to,
    provider_of,
    said_again,
    schema_of,
    shaped_as,
)
from lightning_openai.other_clients import OtherCall
from lightning_openai.reading.abandoned import abandoned
from lightning_openai.reading.unfinished import unfinished
from lightning_spans.chat.stream import put_together
from lightning_spans.record.context import use_context
from lightning_spans.record.instrument.imports import when_imported
from lightning_spans.record.instrument.patches import Undo
from lightning_spans.record.instrument.scope import place_of_call, with_scope
from lightning_spans.schema import spans as names
from lightning_spans.schema.spans import Json

if TYPE_CHECKING:
    from lightning_spans.hooks import Recorder

PLUGIN: Final = "lightning_openai"
_MODULES: Final = ("litellm.main", "litellm.responses.main")
_ENDPOINTS: Final = {
    "completion": "/chat/completions",
    "acompletion": "/chat/completions",
    "text_completion": "/completions",
    "atext_completion": "/completions",
    "responses": "/responses",
    "aresponses": "/responses",
}
_SAME_ARGUMENTS: Final = {"atext_completion": "text_completion"}  # which accepts any arguments
# LiteLLM's asynchronous functions call the synchronous ones with one of these arguments to get a coroutine.
_INNER: Final = ("acompletion", "atext_completion", "aresponses")
# The arguments that are part of a request's body. The others are LiteLLM's own settings, and keys.
_BODY: Final = frozenset((
    "messages", "prompt", "input", "instructions", "functions", "function_call", "temperature", "top_p", "n", "stream",
    "stream_options", "stop", "max_completion_tokens", "max_tokens", "max_output_tokens", "modalities", "prediction",
    "presence_penalty", "frequency_penalty", "logit_bias", "response_format", "seed", "tools", "tool_choice",
    "logprobs", "top_logprobs", "parallel_tool_calls", "reasoning_effort", "verbosity", "thinking", "reasoning", "text",
    "previous_response_id", "store", "truncation", "include", "service_tier", "web_search_options", "top_k", "min_p",
    "repetition_penalty", "best_of", "echo", "suffix", "extra_body",
))  # fmt: skip


def follow(recorder: Callable[[], Recorder | None]) -> Undo:
    """Record LiteLLM's calls, from its import until the undo.

    Args:
        recorder: returns the recorder; None: nothing is recorded now.
    """
    undo = Undo()
    for name in _MODULES:
        undo.add(when_imported(name, lambda module: _change(module, recorder)))
    return undo


def _change(module: ModuleType, recorder: Callable[[], Recorder | None]) -> Undo:
    undo = Undo()
    found = {name: _cell(getattr(module, name)) for name in _ENDPOINTS if hasattr(module, name)}
    originals = {name: cell.cell_contents for name, cell in found.items()}
    for name, cell in found.items():
        signature = inspect.signature(originals[_SAME_ARGUMENTS.get(name, name)])
        wrap = _wrap_async if inspect.iscoroutinefunction(originals[name]) else _wrap
        undo.add(_put(cell, wrap(originals[name], _Function(_ENDPOINTS[name], signature, recorder))))
    return undo


def _cell(function: Any) -> Any:
    """Return the closure cell in which LiteLLM's decorator keeps the decorated function."""
    while function is not None:
        held = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        if "original_function" in held:
            return held["original_function"]
        function = getattr(function, "__wrapped__", None)
    raise AttributeError("LiteLLM's decorator holds no `original_function`: this version of LiteLLM is not known")


def _put(cell: Any, function: Any) -> Callable[[], None]:
    original = cell.cell_contents
    cell.cell_contents = function

    def undo() -> None:
        if cell.cell_contents is function:
            cell.cell_contents = original

    return undo


class _Function(NamedTuple):
    """One of LiteLLM's functions."""

    endpoint: str
    signature: inspect.Signature
    recorder: Callable[[], Recorder | None]

    def begin(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, left: bool
    ) -> tuple[OtherCall, dict[str, Any]] | None:
        """Return the call about to be made, and its arguments; None if it is not recorded.

        Args:
            args: as the caller gave them.
            kwargs: likewise.
            left: whether a replay has left the call to the program's own endpoint.
        """
        recorder = self.recorder()
        if recorder is None or any(kwargs.get(name) is True for name in _INNER):
            return None
        with recorder.guard(PLUGIN):
            return self._begin(recorder, args, kwargs, left=left)
        return None

    def _begin(
        self, recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any], *, left: bool
    ) -> tuple[OtherCall, dict[str, Any]]:
        given: dict[str, Any] = {}
        for name, value in self.signature.bind(*args, **kwargs).arguments.items():
            if self.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
                given.update(value)
            else:
                given[name] = value
        context = place_of_call()
        caller = caller_in(context)
        provider, model = provider_of(given)
        attempt = caller.goes_to(recorder)
        leads = attempt is None and not left and asks_first(given, caller.attempt, self.endpoint)
        body = _body(given, model)
        if attempt is not None:
            given = led_to(attempt, given, self.endpoint, attempt.model)
            body = _body(given, attempt.model)
        elif leads and caller.attempt is not None:
            kept = shaped_as(given)
            given = {**led_to(caller.attempt, given, self.endpoint, model), "allowed_openai_params": kept}
        call = OtherCall(
            recorder,
            PLUGIN,
            "litellm",
            lambda: body,
            provider=provider,
            streamed=bool(given.get("stream")),
            endpoint=self.endpoint,
            place=lambda: context,
            known={names.REROUTED: True} if attempt is not None or leads else {},
            leads=leads,
        )
        return call, given

    def failed(self, call: OtherCall, error: BaseException) -> None:
        """End the span of a call that raised. A replayed error gets its recorded message.

        Raises:
            LeftToOwnEndpointError: a replay leaves the call to the program's own endpoint.
        """
        if call.leads:
            if call.is_left(error):
                raise LeftToOwnEndpointError from None
            said_again(error, call.provider)
        call.end(error=error)

    def answered(self, call: OtherCall, answer: Any) -> Any:
        """End the span of a call, now or when its stream is read."""
        if call.scope.seen:  # the openai client's, or that of a nested LiteLLM call
            return answer
        if hasattr(answer, "__next__") or hasattr(answer, "__anext__"):
            call.begin()
            _read(answer, _LitellmReading(call, self.endpoint))
        else:
            call.end(lambda: answer.model_dump(mode="json", warnings=False))
        return answer


def _body(given: Mapping[str, Any], model: str) -> dict[str, Any]:
    """Return the request in OpenAI's format."""
    body = {"model": model, **{name: given[name] for name in given if name in _BODY and given[name] is not None}}
    if isinstance(body.get("messages"), list):
        body["messages"] = list(body["messages"])
    if isinstance(body.get("response_format"), type):
        body["response_format"] = schema_of(body["response_format"])
    more = body.pop("extra_body", None)
    return {**body, **more} if isinstance(more, Mapping) else body


def _wrap(original: Callable[..., Any], function: _Function) -> Callable[..., Any]:
    def ask_once(args: tuple[Any, ...], kwargs: dict[str, Any], *, left: bool) -> Any:
        begun = function.begin(args, kwargs, left=left)
        if begun is None:
            return original(*args, **kwargs)
        call, given = begun
        try:
            with use_context(with_scope(call.scope)):
                answer = original(**given)
        except BaseException as error:
            function.failed(call, error)
            raise
        return function.answered(call, answer)

    @functools.wraps(original)
    def ask(*args: Any, **kwargs: Any) -> Any:
        try:
            return ask_once(args, kwargs, left=False)
        except LeftToOwnEndpointError:
            pass
        return ask_once(args, kwargs, left=True)

    return ask


def _wrap_async(original: Callable[..., Any], function: _Function) -> Callable[..., Any]:
    async def ask_once(args: tuple[Any, ...], kwargs: dict[str, Any], *, left: bool) -> Any:
        begun = function.begin(args, kwargs, left=left)
        if begun is None:
            return await original(*args, **kwargs)
        call, given = begun
        try:
            with use_context(with_scope(call.scope)):
                answer = await original(**given)
        except BaseException as error:
            function.failed(call, error)
            raise
        return function.answered(call, answer)

    @functools.wraps(original)
    async def ask(*args: Any, **kwargs: Any) -> Any:
        try:
            return await ask_once(args, kwargs, left=False)
        except LeftToOwnEndpointError:
            pass
        return await ask_once(args, kwargs, left=True)

    return ask


class _LitellmReading:
    """A LiteLLM stream that is being read. It holds the call, not the stream, which may be abandoned."""

    def __init__(self, call: OtherCall, endpoint: str) -> None:
        self.call = call
        self._endpoint = endpoint
        self._items: list[Any] = []
        self.inside = False  # the stream's own methods may call each other
        self._over = False
        unfinished.add(self)

    @contextmanager
    def one_more(self) -> Iterator[None]:
        """Enclose the request for an item. The span ends if there is none."""
        self.inside = True
        try:
            with use_context(with_scope(self.call.scope)):
                yield
        except (StopIteration, StopAsyncIteration):
            self.end()
            raise
        except BaseException as error:
            self.end(error)
            raise
        finally:
            self.inside = False

    def took(self, item: Any) -> Any:
        """Keep an item that the agent gets."""
        self._items.append(item)
        return item

    def end(self, error: BaseException | None = None) -> None:
        """End the span with what was read."""
        if self._over:
            return
        self._over = True
        unfinished.discard(self)
        self.call.end(self._answer if self._items else None, error=error)

    def end_left(self) -> None:
        """End the span of an abandoned stream."""
        self.end(GeneratorExit())

    def left(self) -> None:
        """Have the span ended. The garbage collector may call this."""
        if not self._over:
            abandoned.take(self.end_left)

    def leave(self) -> None:
        """Leave the span to the parent of a forked child."""
        self._over = True

    def _answer(self) -> Mapping[str, Json] | None:
        dumped = [item.model_dump(mode="json", exclude_none=True, warnings=False) for item in self._items]
        return put_together(self._endpoint, dumped)


def _read(stream: Any, reading: _LitellmReading) -> None:
    """Record the reading of a stream. The stream stays the same object."""
    try:
        object.__setattr__(stream, "_lightning", reading)
        kind: Any = type(stream)  # a type is hashable, which mypy does not know
        stream.__class__ = _class_for(kind)
    except (AttributeError, TypeError):  # a bare generator
        reading.end_left()
        return
    weakref.finalize(stream, reading.left).atexit = False


@functools.cache
def _class_for(kind: Any) -> Any:
    """Return a subclass of a stream's class that reports what is read and otherwise behaves the same."""
    return type(kind.__name__, (kind,), dict(_methods(kind)) | {"__module__": kind.__module__})


def _methods(kind: Any) -> Iterator[tuple[str, Any]]:
    def next_item(self: Any) -> Any:
        reading = self._lightning
        if reading.inside:
            return kind.__next__(self)
        with reading.one_more():
            return reading.took(kind.__next__(self))

    async def next_item_async(self: Any) -> Any:
        reading = self._lightning
        with reading.one_more():
            return reading.took(await kind.__anext__(self))

    async def close(self: Any) -> None:
        try:
            await kind.aclose(self)
        finally:
            self._lightning.end_left()

    if hasattr(kind, "__next__"):
        yield "__next__", next_item
    if hasattr(kind, "__anext__"):
        yield "__anext__", next_item_async
    if hasattr(kind, "aclose"):
        yield "aclose", close
