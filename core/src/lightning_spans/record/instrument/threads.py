"""Carries the OTel Context into threads and executors, so that the agent that started them stays the current one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from opentelemetry.instrumentation.threading import ThreadingInstrumentor

from lightning_spans.record.context import current, use_context
from lightning_spans.record.instrument.patches import Undo, replace


def carry_context() -> Callable[[], None]:
    """Carry it, until the returned function is called.

    This uses OTel's own instrumentation, unless the user's tracing has already enabled it. That instrumentation leaves
    out threads of a class with its own `run`, which are handled here.
    """
    undo = Undo()
    instrumentor = ThreadingInstrumentor()
    if not instrumentor.is_instrumented_by_opentelemetry:
        instrumentor.instrument()
        undo.add(instrumentor.uninstrument)
    undo.add(replace(threading.Thread, "start", _wrap_start))
    return undo


def _wrap_start(original: Callable[..., Any]) -> Callable[..., Any]:
    def start(thread: Any) -> Any:
        if "run" not in vars(thread) and _has_own_run(type(thread)):
            run, context = thread.run, current()

            def carried() -> None:
                del thread.run
                with use_context(context):
                    run()

            thread.run = carried
        return original.__get__(thread)()

    return start


def _has_own_run(kind: type) -> bool:
    owner = next(known for known in kind.__mro__ if "run" in vars(known))
    return owner not in (threading.Thread, threading.Timer)
