"""Carries the attempt and current agent into processes: new ones, and pools that already exist.

A new process gets them as variables, however it is started: `subprocess` in its environment; a process that
`multiprocessing` or loky spawns, or forks from a server, in what it reads first. A task for a pool carries them itself,
because the pool's processes may have been started in another attempt.
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

from lightning_spans.record.children import attempt_variables
from lightning_spans.record.context import current_agent, from_environment, use_context, with_agent, with_attempt
from lightning_spans.record.instrument.imports import when_imported
from lightning_spans.record.instrument.patches import Undo, replace
from lightning_spans.record.pipeline import live_recorder

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


def _wrap_submit(original: Callable[..., Any]) -> Callable[..., Any]:
    def submit(pool: Any, function: Any, *args: Any, **options: Any) -> Any:
        variables = attempt_variables()
        return original.__get__(pool)(CarriedCall(function, variables) if variables else function, *args, **options)

    return submit


class CarriedCall:
    """A pool's task that runs in the attempt, and for the agent, in which it was submitted.

    Its spans are delivered before its result is returned, because nothing waits for the process, which continues.
    """

    def __init__(self, function: Callable[..., Any], variables: Mapping[str, str]) -> None:
        self.function = function
        self.variables = variables
        self.agent = current_agent()
        self.process = os.getpid()
        functools.update_wrapper(self, function, assigned=("__doc__",), updated=())

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Call the function."""
        attempt = from_environment(self.variables)
        if attempt is None:
            return self.function(*args, **options)
        context = with_attempt(attempt)
        recorder = live_recorder() if self.process != os.getpid() else None
        try:
            with use_context(context if self.agent is None else with_agent(self.agent, context)):
                return self.function(*args, **options)
        finally:
            if recorder is not None:
                recorder.tracer.flush(FLUSH_S)
