"""The main thread of a worker that runs one attempt at a time: it runs the user's functions.

Signal handlers can be set in no other thread, and some reward functions rely on them. The worker's own event loop runs
in a second thread.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Executor, Future
from queue import SimpleQueue
from typing import Any

from lightning_trainer.runner.worker.execution import in_thread


class MainThread(Executor):
    """Executor that runs the user's functions in the thread that created it, which is in `serve` meanwhile."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._loop = asyncio.Runner()
        self._task: asyncio.Task[Any] | None = None

    def submit(self, function: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        """Call a function that raises nothing in the main thread, after those that were submitted before."""
        future: Future[Any] = Future()

        def call() -> None:
            if future.set_running_or_notify_cancel():
                future.set_result(function(*args, **options))

        self._calls.put(call)
        return future

    def awaitable(self, function: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
        """Make a function awaitable: it runs in the main thread, an async one on an event loop there."""

        def call(*args: Any) -> Any:
            result = function(*args)
            if not inspect.isawaitable(result):
                return result
            return self._loop.run(self._await(result), context=contextvars.copy_context())

        async def call_there(*args: Any) -> Any:
            return await in_thread(call, args, self, on_cancel=self._cancel)

        return call_there

    def serve(self, worker: Callable[[], Coroutine[Any, Any, bool]]) -> None:
        """Run a worker in a second thread, and what it submits in this one, until the worker has ended.

        Args:
            worker: returns whether an attempt still runs; then this process is ended.
        """

        def work() -> None:
            try:
                if asyncio.run(worker()):
                    os._exit(1)  # the main thread is in a call that never ends
            finally:
                self._calls.put(None)

        threading.Thread(target=work, name="lightning-worker").start()
        while (call := self._calls.get()) is not None:
            call()
        self._loop.close()

    async def _await(self, result: Awaitable[Any]) -> Any:
        self._task = asyncio.current_task()
        try:
            return await result
        finally:
            self._task = None

    def _cancel(self) -> None:
        if (task := self._task) is not None:
            task.get_loop().call_soon_threadsafe(task.cancel)
