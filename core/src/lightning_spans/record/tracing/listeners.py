"""Calls the hooks for each span without delaying the agent or the delivery of its spans."""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final

from lightning_spans import hooks
from lightning_spans.record.process import in_child
from lightning_spans.record.stalls import waiting

if TYPE_CHECKING:
    from lightning_spans.record.recorder import RecordingSpan

logger = logging.getLogger("lightning_spans")

QUEUE_SIZE: Final = 16_384
CLOSE_S: Final = 2.0
NAMING_S: Final = 5.0
_ENDED: Final = "lightning_span_ended"


class SpanFeed:
    """Passes ended spans to a function, in the order in which they ended, in its own thread.

    Args:
        hand: gets one span after the other.
        what: the receiver's name in log messages.
        part: the name in `stalls.BOUNDS` of the wait for it.
        waits_for: describes what exactly it waits for; `what` by default.
        queue_size: spans that may wait for a slow function; further ones are left out, which is logged.
    """

    def __init__(
        self,
        hand: Callable[[RecordingSpan], object],
        what: str,
        *,
        part: str,
        waits_for: Callable[[], str] | None = None,
        queue_size: int = QUEUE_SIZE,
    ) -> None:
        self._hand = hand
        self._what = what
        self._part = part
        self._waits_for = what if waits_for is None else waits_for
        self._queue_size = queue_size
        self._warned_at = -60.0
        self._begin()
        in_child(self._begin)  # a forked child does not have the thread
        atexit.register(self.close)

    def _begin(self) -> None:
        self._queue: deque[RecordingSpan] = deque()
        self._changed = threading.Condition()
        self._busy = False
        self._closing = False
        self._thread: threading.Thread | None = None

    def tell(self, span: RecordingSpan) -> None:
        """Pass on an ended span."""
        with self._changed:
            if self._closing or len(self._queue) >= self._queue_size:
                self._warn()
                return
            self._queue.append(span)
            if self._thread is None:
                name = f"lightning-{self._part.replace(' ', '-')}"
                self._thread = threading.Thread(target=self._run, name=name, daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Wait until all spans so far were passed on; False if the time ran out."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._queue or self._busy), timeout_s)

    def close(self, timeout_s: float | None = None) -> None:
        """Pass on what is left, but wait no longer than `CLOSE_S` by default, and stop."""
        atexit.unregister(self.close)
        limit_s = CLOSE_S if timeout_s is None else timeout_s
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(limit_s)
            if self._thread.is_alive():
                left = len(self._queue)
                logger.warning(
                    "lightning: %s takes longer than %g s; it does not get %d spans", self._what, limit_s, left
                )
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
                with waiting(self._part, self._waits_for):
                    self._hand(span)
            except BaseException:  # an exception that would end a program does not end our thread
                logger.exception("lightning: %s did not get span %s", self._what, span.span_id)

    def _warn(self) -> None:
        if time.monotonic() - self._warned_at >= 60.0:
            self._warned_at = time.monotonic()
            logger.warning("lightning: %s gets no more spans, because it is too slow or hangs", self._what)


class Listeners(SpanFeed):
    """Calls ``lightning_span_ended`` for every span."""

    def __init__(self, *, queue_size: int = QUEUE_SIZE) -> None:
        super().__init__(
            lambda span: hooks.notify(_ENDED, span=span.record()),
            _ENDED,
            part="span listener",
            waits_for=lambda: f"{_ENDED} of {hooks.listens(_ENDED)}",
            queue_size=queue_size,
        )
        self._heard_by = hooks.manager().hook.lightning_span_ended.get_hookimpls

    def tell(self, span: RecordingSpan) -> None:
        """Notify the listeners of an ended span, if there are any."""
        if self._heard_by():
            super().tell(span)


class Naming:
    """Calls ``lightning_agent_name`` in its own thread, and waits for the answer no longer than a limit.

    While an answer is overdue, nothing more is asked, and spans stay unnamed.

    Args:
        limit_s: seconds to wait.
    """

    def __init__(self, *, limit_s: float = NAMING_S) -> None:
        self._limit_s = limit_s
        self._known_by = hooks.manager().hook.lightning_agent_name.get_hookimpls
        self._begin()
        in_child(self._begin)

    def _begin(self) -> None:
        self._asked: SimpleQueue[_Question | None] = SimpleQueue()
        self._overdue: _Question | None = None
        self._thread: threading.Thread | None = None

    def __call__(self, span: RecordingSpan) -> str | None:
        """Return the name of an ended span's agent; None if no plugin knows it, or not in time."""
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
                name = hooks.manager().hook.lightning_agent_name(span=question.span)
                question.name = name if isinstance(name, str) else None
            except BaseException:  # an exception that would end a program does not end our thread
                logger.exception("lightning: lightning_agent_name failed at span %s", question.span.span_id)
            question.answered.set()


class _Question:
    __slots__ = ("answered", "name", "span")

    def __init__(self, span: RecordingSpan) -> None:
        self.span = span
        self.name: str | None = None
        self.answered = threading.Event()
