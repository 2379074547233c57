"""Run or replay a tool's own code: a replay returns the recorded result instead.

Agno calls the code as the entrypoint of a `Function`, inside the function's hooks. The same function may run in several
threads at once, so its entrypoint stays replaced as long as any thread uses it, and each thread looks up its own span.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from lightning_spans.record.replay import (
    aoutcome_for,
    arun_or_replay,
    keep_raised,
    keep_returned,
    outcome_for,
    run_or_replay,
    tool_around,
)

if TYPE_CHECKING:
    from types import TracebackType

    from lightning_spans.hooks import OpenSpan


@dataclass(slots=True)
class _Replacement:
    original: Callable[..., Any]
    wrapper: Callable[..., Any]
    uses: int = 0


_replaced: Final[dict[int, _Replacement]] = {}  # by the id of the function
_raised: Final[dict[str, list[BaseException]]] = {}  # by the span they belong to
_lock: Final = threading.Lock()


class OwnCode:
    """Context in which a function's own code may be called for one tool span.

    Args:
        function: Agno's function.
        span: the tool span.
        raised: receives the exception that the code raises; Agno turns it into text.
    """

    def __init__(self, function: Any, span: OpenSpan, raised: list[BaseException]) -> None:
        self._function = function
        self._span_id = span.span_id
        self._errors = raised

    def __enter__(self) -> None:
        function = self._function
        with _lock:
            _raised[self._span_id] = self._errors
            found = _replaced.get(id(function))
            if found is None and function.entrypoint is not None:
                found = _replaced[id(function)] = _Replacement(function.entrypoint, wrap_code(function.entrypoint))
                function.entrypoint = found.wrapper
            if found is not None:
                found.uses += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        function = self._function
        with _lock:
            _raised.pop(self._span_id, None)
            found = _replaced.get(id(function))
            if found is None:
                return
            found.uses -= 1
            if found.uses == 0:
                del _replaced[id(function)]
                if function.entrypoint is found.wrapper:  # otherwise a hook has replaced it
                    function.entrypoint = found.original


def wrap_code(code: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of the same kind that replays the recorded result, or calls the code and records it."""
    if inspect.isasyncgenfunction(code):
        return functools.wraps(code)(_of_async_generator(code))
    if inspect.isgeneratorfunction(code):
        return functools.wraps(code)(_of_generator(code))
    if inspect.iscoroutinefunction(code):

        async def arun(*args: Any, **kwargs: Any) -> Any:
            with _noting():
                return await arun_or_replay(lambda: code(*args, **kwargs), keep=_keep)

        return functools.wraps(code)(arun)

    def run(*args: Any, **kwargs: Any) -> Any:
        with _noting():
            return run_or_replay(lambda: code(*args, **kwargs), keep=_keep)

    return functools.wraps(code)(run)


def _of_generator(code: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Iterator[Any]:
        span = tool_around()
        given = None if span is None else outcome_for(span)
        if given is not None:
            yield given.outcome()
            return
        try:
            yield from code(*args, **kwargs)
        except Exception as error:
            if span is not None:
                keep_raised(span, error)
            raise

    return run


def _of_async_generator(code: Callable[..., Any]) -> Callable[..., Any]:
    async def run(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        span = tool_around()
        given = None if span is None else await aoutcome_for(span)
        if given is not None:
            yield given.outcome()
            return
        try:
            async for item in code(*args, **kwargs):
                yield item
        except Exception as error:
            if span is not None:
                keep_raised(span, error)
            raise

    return run


@contextmanager
def _noting() -> Iterator[None]:
    """Record an exception from the block for the current span."""
    try:
        yield
    except BaseException as error:
        span = tool_around()
        if span is not None and span.span_id in _raised:
            _raised[span.span_id].append(error)
        raise


def _keep(span: OpenSpan, value: object) -> None:
    if not isinstance(value, (Iterator, AsyncIterator)):  # reading a generator turns it into text
        keep_returned(span, value)
