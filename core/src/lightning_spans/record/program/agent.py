"""`agent()` and `workflow()`: name the current agent, and mark one run, in plain code or where no framework does.

Both are ``with`` blocks, and decorators of functions and coroutine functions.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any, TypeVar, cast, overload

from lightning_spans.errors import ConfigError
from lightning_spans.hooks import OpenSpan
from lightning_spans.record.context import current_agent, use_context, with_agent
from lightning_spans.record.pipeline import live_recorder
from lightning_spans.schema import spans as names

F = TypeVar("F", bound=Callable[..., Any])


class Block(AbstractContextManager["OpenSpan | None"]):
    """A ``with`` block that is also a decorator: each call of the function is then its own block.

    Args:
        called: its name in errors.
        opened: creates the block.
    """

    def __init__(self, called: str, opened: Callable[[], AbstractContextManager[OpenSpan | None]]) -> None:
        self._called = called
        self._opened = opened
        self._inside: AbstractContextManager[OpenSpan | None] | None = None

    def __enter__(self) -> OpenSpan | None:
        if self._inside is not None:
            raise ConfigError(
                f"{self._called} is already in use by a `with` block. Create one for each block: `with"
                f" {self._called}:`."
            )
        self._inside = self._opened()
        return self._inside.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        inside, self._inside = self._inside, None
        return None if inside is None else inside.__exit__(kind, error, traceback)

    def __call__(self, function: F) -> F:
        """Make each call of a function, or of a coroutine function, such a block.

        Raises:
            ConfigError: it is a generator function: its reader's code runs in between, and would be included.
        """
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            refused = f"{self._called} can't decorate {_name(function)}"
            raise ConfigError(f"{refused}: it is a generator. Decorate the function that reads it.")
        opened = self._opened
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def awaited(*args: Any, **kwargs: Any) -> Any:
                with opened():
                    return await function(*args, **kwargs)

            return cast("F", awaited)

        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            with opened():
                return function(*args, **kwargs)

        return cast("F", called)


def agent(name: str) -> Block:
    """Name the agent at work within the block: for plain programs, and wherever a framework gives no name.

    Model calls within it carry the name. While attached, the block is also an ``invoke_agent`` span, which ``as``
    returns; otherwise None. It is a decorator too: ``@agent("writer")``.
    """
    return Block(f"agent({name!r})", lambda: _agent(name))


@overload
def workflow(name: F, /) -> F: ...
@overload
def workflow(name: str, /) -> Block: ...


def workflow(name: Any, /) -> Any:
    """Record the block as one run: one trace with all of its agents, clients, tasks and threads.

    For a program to which no framework gives a root: each of its calls would be a separate trace. Agents' names do not
    change. As a decorator, ``@workflow`` or ``@workflow("research")``, each call of the function is a run; as ``with
    workflow("research"):`` the block is. While attached it is an ``invoke_workflow`` span, which ``as`` returns,
    otherwise None. A nested one is part of the outer trace. A runner's attempt is one trace without it.

    Args:
        name: shown by viewers; or the decorated function, whose name is used.
    """
    if callable(name):
        return Block(f"workflow({_name(name)!r})", lambda: _workflow(_name(name)))(name)
    return Block(f"workflow({name!r})", lambda: _workflow(name))


def _name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


@contextmanager
def _agent(name: str) -> Iterator[OpenSpan | None]:
    with _open_span(names.INVOKE_AGENT, name, agent=name) as span:
        if span is not None:
            yield span
            return
        with use_context(with_agent(name)):
            yield None


def _workflow(name: str) -> AbstractContextManager[OpenSpan | None]:
    return _open_span(names.INVOKE_WORKFLOW, name, agent=None)


@contextmanager
def _open_span(operation: str, name: str, agent: str | None) -> Iterator[OpenSpan | None]:
    """Make the block a span, and enter its context; None while nothing is attached."""
    recorder = live_recorder()
    span = None
    if recorder is not None:
        with recorder.guard(operation):
            span = recorder.start(operation, name, agent=agent or current_agent())
    if recorder is None or span is None:
        yield None
        return
    failed: BaseException | None = None
    try:
        with use_context(span.context):
            yield span
    except BaseException as error:
        failed = error
        raise
    finally:
        with recorder.guard(operation, span):
            span.end(error=failed)
