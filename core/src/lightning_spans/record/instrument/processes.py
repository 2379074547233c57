"""Carries the attempt and current agent into processes: new ones, and pools that already exist.

A new process gets them as variables, however it is started: `subprocess` in its environment; a process that
`multiprocessing` or loky spawns, or forks from a server, in what it reads first. A task for a pool carries them itself,
and the terms of data, because the pool's processes may have been started in another attempt and inherited its context.
"""

from __future__ import annotations

import functools
import inspect
import os
import subprocess
from collections.abc import Callable, Mapping
from multiprocessing import spawn
from types import ModuleType
from typing import Any, Final

from opentelemetry.context import Context

from lightning_spans.record.children import attempt_variables, replace_variables, task_variables
from lightning_spans.record.context import (
    AGENT_VARIABLE,
    at_work,
    current_terms,
    from_environment,
    is_inside,
    overlaid,
    settle_context,
    use_context,
    with_terms,
)
from lightning_spans.record.instrument.imports import when_imported
from lightning_spans.record.instrument.patches import Undo, replace
from lightning_spans.record.pipeline import live_recorder
from lightning_spans.record.recorder import current_span
from lightning_spans.schema.attempts import Attempt

FLUSH_S: Final = 5.0
_POOL: Final = ("apply_async", "_map_async", "imap", "imap_unordered")  # all others call one of these
_EXECUTORS: Final = (
    "concurrent.futures.process",
    "loky.process_executor",
    "joblib.externals.loky.process_executor",
)
_PREPARED: Final = ("loky.backend.spawn", "joblib.externals.loky.backend.spawn")  # copies of `multiprocessing.spawn`
_users = 0
_undo = Undo()
_inherited = False  # whether a pool may exist whose workers inherited an attempt, an agent or an open span


def carry_attempts() -> Callable[[], None]:
    """Carry attempt and agent into processes, until everyone who called this has called the returned function."""
    global _users  # noqa: PLW0603 - what is patched is process-wide
    if not _users:
        _undo.add(replace(subprocess.Popen, "__init__", _wrap_popen))
        _undo.add(replace(spawn, "get_preparation_data", _wrap_prepared))
        for name in _PREPARED:
            _undo.add(when_imported(name, lambda module: replace(module, "get_preparation_data", _wrap_prepared)))
        for name in _EXECUTORS:
            _undo.add(when_imported(name, lambda module: replace(module.ProcessPoolExecutor, "submit", _wrap_submit)))
        _undo.add(when_imported("multiprocessing.pool", _follow_pool))
    _users += 1
    undo = Undo()
    undo.add(_leave)
    return undo


def _leave() -> None:
    global _users  # noqa: PLW0603
    _users -= 1
    if not _users:
        _undo()


def _follow_pool(module: ModuleType) -> Callable[[], None]:
    undo = Undo()
    undo.add(replace(module.Pool, "__init__", _wrap_start))
    for name in _POOL:
        undo.add(replace(module.Pool, name, _wrap_submit))
    return undo


def _wrap_popen(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    def start(popen: Any, *args: Any, **options: Any) -> Any:
        variables = attempt_variables()
        if variables:
            bound = signature.bind(popen, *args, **options)
            given = bound.arguments.get("env")
            bound.arguments["env"] = {**(os.environ if given is None else given), **variables}
            args, options = bound.args[1:], bound.kwargs
        return original.__get__(popen)(*args, **options)

    return start


class _Variables:
    """Sets variables in the process that unpickles it, before that process has the paths of our modules."""

    def __init__(self, values: Mapping[str, str]) -> None:
        self._values = dict(values)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return eval, (f"__import__('os').environ.update({self._values!r})",)


def _wrap_prepared(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_preparation_data(*args: Any, **options: Any) -> Any:
        data = original(*args, **options)
        variables = attempt_variables()
        return {**data, "lightning": _Variables(variables)} if variables else data

    return get_preparation_data


def _note_context(context: Context) -> bool:
    """Note what a pool started here inherits. Returns whether any pool may have inherited something."""
    global _inherited  # noqa: PLW0603 - such a pool may outlive every attachment
    _inherited = _inherited or is_inside(context)
    return _inherited


def _wrap_start(original: Callable[..., Any]) -> Callable[..., Any]:
    def start(pool: Any, *args: Any, **options: Any) -> None:
        _note_context(settle_context())
        original.__get__(pool)(*args, **options)

    return start


def _wrap_submit(original: Callable[..., Any]) -> Callable[..., Any]:
    def submit(pool: Any, *args: Any, **options: Any) -> Any:
        context = settle_context()
        # Otherwise the task is not changed: a process that is spawned would import this package for it.
        if _note_context(context):
            if args:
                args = (CarriedCall(args[0], context), *args[1:])
            elif "func" in options:
                options["func"] = CarriedCall(options["func"], context)
        return original.__get__(pool)(*args, **options)

    return submit


class CarriedCall:
    """A pool's task that runs in the attempt, and for the agent, in which it was submitted; in none if there was none.

    Its spans are delivered before its result is returned, because nothing waits for the process, which continues.
    """

    def __init__(self, function: Callable[..., Any], context: Context) -> None:
        span = current_span(context)
        self.function = function
        self.variables = task_variables(context)
        self.terms = dict(current_terms(context))
        self.span_id = None if span is None else span.span_id
        self.context: Context | None = context  # for a pool of threads
        functools.update_wrapper(self, function, assigned=("__doc__",), updated=())

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "context": None}

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Call the function."""
        if self.context is not None:
            with use_context(overlaid(self.context)):
                return self.function(*args, **options)
        replace_variables(self.variables)
        attempt = from_environment()
        recorder = live_recorder() if attempt is not None else None
        try:
            with use_context(self._make_context(attempt)):
                return self.function(*args, **options)
        finally:
            if recorder is not None:
                recorder.tracer.flush(FLUSH_S)

    def _make_context(self, attempt: Attempt | None) -> Context:
        """Return a context for this process. The open span is kept if the process was forked within it."""
        inherited = current_span()
        here = settle_context() if inherited is not None and inherited.span_id == self.span_id else overlaid(Context())
        return with_terms(self.terms, at_work(self.variables.get(AGENT_VARIABLE), attempt, here))
