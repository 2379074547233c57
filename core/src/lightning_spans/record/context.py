"""The current agent and attempt, kept in the OpenTelemetry Context.

The OTel Context is used instead of a ContextVar because threading instrumentation carries it into threads and
executors, where a ContextVar of our own was lost. There is no process-wide current attempt, because one process runs
many.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, TypeVar
from urllib.parse import unquote

from opentelemetry import context as otel_context
from opentelemetry.context import Context

from lightning_spans.schema.attempts import Attempt
from lightning_spans.schema.json import from_json, loads
from lightning_spans.schema.replays import Replay

STARTING = "lightning-starting"  # key under which OTel's SDK finds our span when it starts one
SCOPE = "lightning-scope"  # key of the innermost `Entry`; see `instrument.scope`
AGENT_VARIABLE = "LIGHTNING_AGENT"  # names the agent that a process works for, if nothing within it names one
_PREFIX = "lightning-"  # everything that we keep in the OTel Context
_AGENT = "lightning-agent"
_TERMS = "lightning-terms"
_ATTEMPT = "lightning-attempt"

T = TypeVar("T")


def _direct() -> tuple[Callable[[], Context], Callable[[Any], Any], Callable[[Any], object]]:
    """Return the functions that OTel's `get_current`, `attach` and `detach` end up calling.

    Each is two calls, and a stream makes four per item. OTel also logs a traceback if a context is left in another
    execution context than it was entered in.
    """
    variable = getattr(getattr(otel_context, "_RUNTIME_CONTEXT", None), "_current_context", None)
    if type(variable) is ContextVar:
        return variable.get, variable.set, variable.reset
    return otel_context.get_current, otel_context.attach, otel_context.detach  # the user has set OTEL_PYTHON_CONTEXT


current, attach, _detach = _direct()


def from_environment(environ: Mapping[str, str] | None = None) -> Attempt | None:
    """Read the attempt that a runner set for this process; None if there is none."""
    env = os.environ if environ is None else environ
    if not (env.get("LIGHTNING_ROLLOUT_ID") and env.get("LIGHTNING_ATTEMPT_ID")):
        return None
    return Attempt(
        rollout_id=env["LIGHTNING_ROLLOUT_ID"],
        attempt_id=env["LIGHTNING_ATTEMPT_ID"],
        endpoint=env.get("LIGHTNING_ENDPOINT") or None,
        key=env.get("LIGHTNING_KEY") or None,
        agents=tuple(unquote(name) for name in env.get("LIGHTNING_AGENTS", "").split(",") if name),
        model=env.get("LIGHTNING_MODEL", "policy"),
        prompts=loads(env.get("LIGHTNING_PROMPTS") or "{}"),
        replay=from_json(Replay, loads(text)) if (text := env.get("LIGHTNING_REPLAY")) else None,
    )


class Entry:
    """A context that is entered for some time. Copies of it may exist for longer.

    Attributes:
        previous: the context that was current before.
        entered: the context that was entered; None before that.
        closed: whether it has ended.
    """

    __slots__ = ("closed", "entered", "previous")

    def __init__(self) -> None:
        self.previous: Context | None = None
        self.entered: Context | None = None
        self.closed = False


def settle_context(context: Context | None = None) -> Context:
    """Return a context without what ended entries have left in it.

    A framework may report the end of its work in a copy of its context (asyncio shields callbacks), so the awaiting
    code still has the work's own. Values that were set after the entry stay: an attempt, an agent, other libraries'
    values.

    Args:
        context: by default the current one.
    """
    context = current() if context is None else context
    entry = context.get(SCOPE)
    while isinstance(entry, Entry) and entry.closed and entry.entered is not None:  # nearly always zero times
        context = (entry.previous or Context()) if context is entry.entered else _without(context, entry, entry.entered)
        entry = context.get(SCOPE)
    return context


def _without(context: Context, entry: Entry, entered: Context) -> Context:
    """Undo an entry's changes to a context, except those that were changed again later."""
    before = entry.previous or Context()
    values = {
        key: value for key, value in context.items() if not (key.startswith(_PREFIX) and value is entered.get(key))
    }
    ours = {key: value for key, value in before.items() if key.startswith(_PREFIX)}
    return Context({**ours, **values})


def current_agent(context: Context | None = None) -> str | None:
    """Return the agent at work in this context; None if nothing named one."""
    name = (settle_context() if context is None else context).get(_AGENT)
    return name if isinstance(name, str) else os.environ.get(AGENT_VARIABLE) or None


def current_attempt(context: Context | None = None) -> Attempt | None:
    """Return the attempt of this context, otherwise the environment's, otherwise None."""
    attempt = given_attempt(settle_context() if context is None else context)
    return from_environment() if attempt is None else attempt


def given_attempt(context: Context) -> Attempt | None:
    """Return the attempt of this context; None if there is none, or if the environment names it."""
    attempt = context.get(_ATTEMPT)
    return attempt if isinstance(attempt, Attempt) else None


def with_agent(name: str | None, context: Context | None = None) -> Context:
    """Return a context with this agent as the current one."""
    return Context({**(settle_context() if context is None else context), _AGENT: name})


def is_inside(context: Context) -> bool:
    """Whether this context holds anything of ours: an attempt, an agent, terms or an open span."""
    return any(key.startswith(_PREFIX) for key in context)


def current_terms(context: Context) -> Mapping[str, Any]:
    """Return the terms of data that a program stated around this context, as attributes."""
    terms = context.get(_TERMS)
    return terms if isinstance(terms, Mapping) else {}


def with_terms(terms: Mapping[str, Any], context: Context | None = None) -> Context:
    """Return a context in which data has these terms, and no others."""
    return Context({**(settle_context() if context is None else context), _TERMS: terms})


def with_attempt(attempt: Attempt, context: Context | None = None) -> Context:
    """Return a context that belongs to this attempt."""
    return Context({**(settle_context() if context is None else context), _ATTEMPT: attempt})


def at_work(agent: str | None, attempt: Attempt | None, values: Mapping[str, object]) -> Context:
    """Return a context with these values, this current agent, and this attempt unless it is None."""
    given = {_AGENT: agent} if attempt is None else {_AGENT: agent, _ATTEMPT: attempt}
    return Context({**values, **given})


@contextmanager
def use_context(context: Context) -> Iterator[Context]:
    """Make `context` the current one within the block."""
    token = attach(context)
    try:
        yield context
    finally:
        with suppress(ValueError):  # an async generator that its event loop closes: there is nothing to leave
            _detach(token)


def overlaid(ours: Context, onto: Context | None = None) -> Context:
    """Return a context with our values from `ours` and all other values from `onto` (the current one by default)."""
    base = current() if onto is None else onto
    theirs = {key: value for key, value in base.items() if not key.startswith(_PREFIX)}
    return Context({**theirs, **{key: value for key, value in ours.items() if key.startswith(_PREFIX)}})


class Steps:
    """The contexts of a generator and of its reader, swapped at each step. Other code may change them in between.

    A generator shares its reader's execution context, so what it entered itself would leak at each ``yield``. What
    others put into the OTel Context within it (the user's tracing) still does.

    Args:
        inner: the generator's context; None: its reader's.

    Attributes:
        entered: the context that `enter` made current; None before that, or if there is nothing to enter. While it is
            current, `leave` equals `attach(outer)`, and the next `enter`, while `outer` is current, `attach(entered)`:
            a stream of many items may do this itself, and set `inside`.
        outer: the reader's context.
        inside: whether the generator is running.
    """

    __slots__ = ("_inner", "entered", "inside", "outer")

    def __init__(self, inner: Context | None) -> None:
        self._inner = inner
        self.entered: Context | None = None
        self.outer = inner
        self.inside = False

    def enter(self) -> None:
        """Make the generator's context the current one."""
        if self._inner is None:
            return
        outer = current()
        if self.entered is None or outer is not self.outer or self._inner is not self.entered:
            self.entered, self.outer = overlaid(self._inner, outer), outer
        self.inside = True
        attach(self.entered)

    def leave(self) -> None:
        """Restore the reader's context."""
        if self._inner is None or self.outer is None:
            return
        self._inner = inner = current()
        self.inside = False
        # No token: the last step may run in another execution context.
        attach(self.outer if inner is self.entered else overlaid(self.outer, inner))

    async def close(self, items: AsyncGenerator[Any, None]) -> None:
        """Close the generator in its context, and leave the context."""
        if not self.inside:
            self.enter()
        try:
            await items.aclose()
        finally:
            self.leave()


async def entered_steps(context: Context, items: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    """Run an async generator within `context`; its reader's code between two items runs outside it."""
    steps = Steps(context)
    try:
        steps.enter()
        async for item in items:
            steps.leave()
            yield item
            steps.enter()
    finally:
        await steps.close(items)


def entered_iteration(context: Context, items: Generator[T, None, None]) -> Generator[T, None, None]:
    """Run a synchronous generator within `context`; see `entered_steps`."""
    steps = Steps(context)
    try:
        steps.enter()
        for item in items:
            steps.leave()
            yield item
            steps.enter()
    finally:
        if not steps.inside:
            steps.enter()
        try:
            items.close()
        finally:
            steps.leave()


@contextmanager
def use_attempt(attempt: Attempt) -> Iterator[Attempt]:
    """Run the block as part of this attempt: root spans begun inside belong to it. See docs/how-to/own-loop.md."""
    with use_context(with_attempt(attempt)):
        yield attempt
