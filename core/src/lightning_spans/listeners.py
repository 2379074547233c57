"""The hooks that are called for each span, where they hold up neither the agent nor the delivery of its spans."""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections import deque
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final

from lightning_spans import plugins
from lightning_spans.forks import in_child
from lightning_spans.watch import waiting

if TYPE_CHECKING:
    from lightning_spans.recorder import OpenSpan

logger = logging.getLogger("lightning_spans")

QUEUE_SIZE: Final = 16_384
CLOSE_S: Final = 2.0
NAMING_S: Final = 5.0
_ENDED: Final = "lightning_span_ended"


class Listeners:
    """Tells ``lightning_span_ended`` of every span, in the order in which they ended, in a thread of its own.

    Args:
        queue_size: spans that may wait for a slow listener; it is not told of more, which is logged.
    """

    def __init__(self, *, queue_size: int = QUEUE_SIZE) -> None:
        self._queue_size = queue_size
        self._heard_by = plugins.manager().hook.lightning_span_ended.get_hookimpls
        self._warned_at = -60.0
        self._begin()
        in_child(self._begin)  # the thread does not live on in a forked child
        atexit.register(self.close)

    def _begin(self) -> None:
        self._queue: deque[OpenSpan] = deque()
        self._changed = threading.Condition()
        self._busy = False
        self._closing = False
        self._thread: threading.Thread | None = None

    def tell(self, span: OpenSpan) -> None:
        """Have the listeners told of an ended span, if there are any."""
        if not self._heard_by():
            return
        with self._changed:
            if self._closing or len(self._queue) >= self._queue_size:
                self._warn()
                return
            self._queue.append(span)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="lightning-listeners", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Wait until the listeners were told of all spans so far; False when the time ran out."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._queue or self._busy), timeout_s)

    def close(self) -> None:
        """Tell what is left, but wait no longer than `CLOSE_S` for a listener, and stop."""
        atexit.unregister(self.close)
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(CLOSE_S)
            if self._thread.is_alive():
                left = len(self._queue)
                logger.warning("lightning: a %s takes longer than %g s; %d spans are not told", _ENDED, CLOSE_S, left)
                self._queue.clear()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: bool(self._queue) or self._closing)
                if not self._queue:
                    return
                span = self._queue.popleft()
                self._busy = True
            try:
                with waiting("span listener", f"{_ENDED} of {plugins.listens(_ENDED)}"):
                    plugins.notify(_ENDED, span=span.record())
            except BaseException:  # what would end a program ends no thread of ours
                logger.exception("lightning: %s was not told of span %s", _ENDED, span.span_id)

    def _warn(self) -> None:
        if time.monotonic() - self._warned_at >= 60.0:
            self._warned_at = time.monotonic()
            logger.warning("lightning: %s is not told of spans: a listener is too slow, or hangs", _ENDED)


class Naming:
    """Asks ``lightning_agent_name`` in a thread of its own, and waits no longer than a limit for the answer.

    While an answer is overdue nothing more is asked: spans go without.

    Args:
        limit_s: seconds to wait.
    """

    def __init__(self, *, limit_s: float = NAMING_S) -> None:
        self._limit_s = limit_s
        self._known_by = plugins.manager().hook.lightning_agent_name.get_hookimpls
        self._begin()
        in_child(self._begin)

    def _begin(self) -> None:
        self._asked: SimpleQueue[_Question | None] = SimpleQueue()
        self._overdue: _Question | None = None
        self._thread: threading.Thread | None = None

    def __call__(self, span: OpenSpan) -> str | None:
        """Name the agent of an ended span; None where no plugin does, or not in time."""
        if not self._known_by():
            return None
        if self._overdue is not None and not self._overdue.answered.is_set():
            return None
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="lightning-naming", daemon=True)
            self._thread.start()
        question = _Question(span)
        self._asked.put(question)
        if question.answered.wait(self._limit_s):
            self._overdue = None
            return question.name
        self._overdue = question
        logger.error("lightning: lightning_agent_name takes longer than %g s; spans go without", self._limit_s)
        return None

    def close(self) -> None:
        """End the thread, once it has answered."""
        self._asked.put(None)

    def _run(self) -> None:
        while (question := self._asked.get()) is not None:
            try:
                name = plugins.manager().hook.lightning_agent_name(span=question.span)
                question.name = name if isinstance(name, str) else None
            except BaseException:  # what would end a program ends no thread of ours
                logger.exception("lightning: lightning_agent_name failed at span %s", question.span.span_id)
            question.answered.set()


class _Question:
    __slots__ = ("answered", "name", "span")

    def __init__(self, span: OpenSpan) -> None:
        self.span = span
        self.name: str | None = None
        self.answered = threading.Event()
