"""A bounded queue of spans, a thread that delivers them in batches, and a spool on disk for what cannot be delivered.

The agent's thread writes a span to the journal and puts it into the queue. It never waits for the network or for a disk
to synchronise. What cannot be delivered is spooled, what cannot be spooled is dropped, and both are counted and
reported.
"""

from __future__ import annotations

import atexit
import logging
import math
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import parent_process
from multiprocessing.util import Finalize, register_after_fork
from typing import Final, TypeAlias

from lightning_spans.record.delivery.deliver import BatchRefusedError, BusyError, Destination
from lightning_spans.record.delivery.ended import CLOSE_S, EndedSpan
from lightning_spans.record.delivery.journal import Journal
from lightning_spans.record.delivery.outbox import OWN_KEY, Spool, line_of
from lightning_spans.record.delivery.reports import Reports
from lightning_spans.record.process import in_child
from lightning_spans.record.stalls import waiting
from lightning_spans.schema.attempts import Attempt
from lightning_spans.schema.spans import Span
from lightning_spans.store.urls import without_secrets

logger = logging.getLogger("lightning_spans")

QUEUE_SIZE: Final = 16_384
BATCH_SIZE: Final = 512
LINGER_S: Final = 0.1  # seconds that a batch waits for more spans
IDLE_S: Final = 0.5  # seconds that an idle thread waits for spans, or for spooled batches
REPLAY_S: Final = 1.0  # seconds after which the delivery of spooled batches is interrupted for new spans
RETRY_S: Final = (1.0, 2.0, 5.0, 15.0, 30.0)
DETACH_S: Final = 2.0  # the same if the process continues without us


@dataclass(slots=True)
class _Line:
    """The state of one destination. An unreachable destination delays no other."""

    failures: int = 0
    retry_at: float = 0.0


Put: TypeAlias = tuple[Span | EndedSpan, Attempt | None]
Deliver = Callable[[Destination, Sequence[Span]], int | None]
"""Sends a batch; gives how many of its spans the other side will never take, or None for none of them."""


class BatchSink:
    """The sink of an attached process.

    Args:
        deliver: sends one batch, and raises if it could not; `BatchRefusedError` if it never can. See `Deliver`.
        route: returns the destinations of a span: usually its attempt's training side, otherwise the process's store.
        spool: keeps on disk what could not be delivered.
        own: the process's own store as a destination. It waits for no other. What is spooled for another process's
            store is left to that process, and what is spooled without its key is sent only to this destination.
        queue_size: spans that may wait; further ones are dropped and counted.
        keeps: whether a span is recorded at all; the others are counted.
        prepare: masks what must not leave the process, before anything is sent or spooled. If it raises, its span is
            dropped.
        finish: called after the last delivery, by the delivering thread.
    """

    def __init__(
        self,
        deliver: Deliver,
        *,
        route: Callable[[Attempt | None], Sequence[Destination]],
        spool: Spool,
        own: Destination | None = None,
        queue_size: int = QUEUE_SIZE,
        keeps: Callable[[Span | EndedSpan, Attempt | None], bool] | None = None,
        prepare: Callable[[Span, Attempt | None], Span] | None = None,
        finish: Callable[[], None] = lambda: None,
    ) -> None:
        self._deliver = deliver
        self._route = route
        self._spool = spool
        self._journal = Journal(spool)
        self._own = Destination() if own is None else own
        self._trying: Destination | None = None
        self._queue_size = queue_size
        self._keeps = keeps
        self._prepare = prepare
        self._finish = finish
        self.reports = Reports()
        self.counts = self.reports.counts
        self._lines: defaultdict[str, _Line] = defaultdict(_Line)
        self._warned_at = -60.0
        self._begin()
        in_child(self._begin_again)
        atexit.register(self.close)
        if parent_process() is not None:
            _close_with_worker(self)
        if (
            spool.pending() or spool.journals()
        ):  # what an earlier process left is delivered even if this one never records a span
            self._start()

    def _begin_again(self) -> None:
        """Start again in a forked child, which does not have the thread. The parent reports its own counts."""
        self.counts = self.reports.begin()
        self._begin()
        register_after_fork(self, _close_with_worker)

    def _begin(self) -> None:
        self._lock = threading.RLock()  # what the collector ends during a `put` is put too
        self._queue: deque[Put] = deque()
        self._current: deque[tuple[Destination, list[Span]]] = deque()  # of the current batch, what is not settled
        self._taken = 0  # spans of that batch
        self._abandoned = False
        self._wake = threading.Event()
        self._done = threading.Condition()
        self._finished = self.counts.put
        self._looks = self._looked = 0  # at the spool: how often delivery was requested, and how often it was done
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="lightning-sink", daemon=True)
        self._started = False

    def put(self, span: Span | EndedSpan, attempt: Attempt | None) -> None:
        """Take a span."""
        if self._keeps is not None and not self._keeps(span, attempt):
            self.counts.sampled_out += 1
            return
        draft = self._make_draft(span, attempt)
        waits = span if not isinstance(span, Span) and span.unnamed else draft
        with self._lock:
            if self._closing or len(self._queue) >= self._queue_size:
                self.counts.dropped += 1
                self._warn("the queue is full or closed")
                return
            self.counts.put += 1
            self._queue.append((waits, attempt))
            self._journal.write(self._route(attempt), draft)
            if not self._started:
                self._start()
        if len(self._queue) >= BATCH_SIZE:
            self._wake.set()

    def _make_draft(self, ended: Span | EndedSpan, attempt: Attempt | None) -> Span:
        given = ended if isinstance(ended, Span) else ended.draft()
        try:
            span = self._prepare_span(given, attempt)
        except Exception:
            self.counts.dropped += 1
            raise
        self.counts.redacted += span.attributes is not given.attributes
        return span

    def _prepare_span(self, given: Span, attempt: Attempt | None) -> Span:
        return given if self._prepare is None else self._prepare(given, attempt)

    def _start(self) -> None:
        try:
            self._thread.start()
            self._started = True
        except RuntimeError as error:  # at the end of the process, since Python 3.12: `close` spools what has arrived
            self._warn(str(error))

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything so far is delivered, spooled or dropped; False if the time ran out.

        What ended processes have left is delivered too.
        """
        with self._lock:
            target = self.counts.put
            self._looks += 1
            look = self._looks
            if not self._started and self._spool.journals():
                self._start()
        self._wake.set()
        with self._done:
            return self._done.wait_for(
                lambda: not self._started or (self._finished >= target and (self._closing or self._looked >= look)),
                timeout_s,
            )

    def close(self, timeout_s: float | None = None) -> None:
        """Deliver or spool what is pending, and stop; report what was not delivered.

        Args:
            timeout_s: what is not delivered by then is spooled, even if a destination may still take it: a span sent
                twice is stored once. By default `CLOSE_S`. Only the spool's own disk may take longer.
        """
        with self._lock:
            if self._closing:
                return
            self._closing = True
        self._wake.set()
        atexit.unregister(self.close)
        if self._started:
            self._join(CLOSE_S if timeout_s is None else timeout_s)
        else:
            self._abandon()  # what arrived when no thread could be started any more
            self._finish()
        self._journal.close()
        left = self.counts
        if left.dropped or left.refused or self._spool.pending():
            logger.warning(
                "lightning: of %d spans %d were delivered; %d were spooled, %d refused, %d dropped; %s",
                left.put, left.delivered, left.spooled, left.refused, left.dropped, self._spool.describe(),
            )  # fmt: skip

    def _join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._abandon()
            if timeout_s < CLOSE_S:  # the current delivery may still succeed
                atexit.register(self._thread.join, CLOSE_S - timeout_s)

    def _run(self) -> None:
        own = self._thread
        more = False
        while not self._abandoned:
            if not more:
                self._wake.wait(LINGER_S if self._queue else IDLE_S)
            self._wake.clear()
            closing = self._closing
            looks = self._looks
            more = self._work(own, closing=closing)
            if own is not self._thread:  # gevent keeps the parent's threads in a forked child, where they cannot end
                threading.Event().wait()
            with self._done:
                if not more:
                    self._looked = looks
                self._done.notify_all()
            if closing and not (self._queue or more):
                break
        try:
            self._finish()
        except Exception:
            logger.exception("lightning: the sender of spans did not close")

    def _work(self, own: threading.Thread, *, closing: bool) -> bool:
        """Deliver what is waiting here, then what is spooled; keep what can neither be sent nor spooled.

        Returns whether more of what is spooled can be delivered at once.
        """
        more = not (self._current or self._queue) and self._replay()
        while self._current or self._queue:
            try:
                if not self._current:
                    self._take()
                while self._current and not self._abandoned:
                    if not self._settle(*self._current[0], closing=closing):
                        return False  # the queue fills in the meantime; what does not fit is dropped and counted
                    if own is not self._thread:
                        return False
                    self._current.popleft()
            except Exception:
                self.counts.dropped += self._taken
                self._current.clear()
                logger.exception("lightning: %d spans are dropped", self._taken)
            if self._abandoned:
                return False
            with self._lock:
                self._journal.settle(all_of_them=not self._queue)
            with self._done:
                self._finished += self._taken
                self._taken = 0
                self._done.notify_all()
            more = self._replay()
        return more

    def _take(self) -> None:
        """Begin a batch."""
        with self._lock:
            batch = [self._queue.popleft() for _ in range(min(BATCH_SIZE, len(self._queue)))]
            if not self._queue:
                self._journal.replace_if_long()
        self._taken = len(batch)
        self._current.extend(self._group_by_destination(batch))

    def _group_by_destination(
        self, batch: Sequence[tuple[Span | EndedSpan, Attempt | None]]
    ) -> list[tuple[Destination, list[Span]]]:
        groups: dict[Destination, list[Span]] = {}
        lists: list[list[Span]] | None = None  # of the previous attempt, whose spans have the same destinations
        before: Attempt | None = None
        for ended, attempt in batch:
            span = ended if isinstance(ended, Span) else self._prepare_span(ended.record(), attempt)
            if lists is None or attempt is not before:
                lists = [groups.setdefault(destination, []) for destination in self._route(attempt)]
                before = attempt
            for spans in lists:
                spans.append(span)
        return list(groups.items())

    def _settle(self, destination: Destination, spans: Sequence[Span], *, closing: bool = False) -> bool:
        """Deliver or spool, and at the end drop. False: neither worked, but it may work later.

        Spans behind a spooled batch for the same destination wait too: a destination gets spans in order.
        """
        url, key = destination.url, destination.written_key
        due = time.monotonic() >= self._lines[line_of(url, key)].retry_at
        if due and not self._spool.waits(url, key) and self._try(destination, spans):
            return True
        kept = self._keep(destination, spans)
        if not kept and closing:
            self.counts.dropped += len(spans)
        return bool(kept) or closing

    def _keep(self, destination: Destination, spans: Sequence[Span]) -> int:
        with waiting("spool write", f"the disk of {self._spool.folder}"):
            kept = self._spool.append(destination.url, destination.written_key, spans)
        self.counts.spooled += kept
        return kept

    def _try(self, destination: Destination, spans: Sequence[Span]) -> bool:
        line = self._lines[line_of(destination.url, destination.written_key)]
        self._trying = destination
        try:
            where = without_secrets(destination.url or "") if destination.remote else "the local store"
            with waiting("sink delivery", f"{where} to take {len(spans)} spans"):
                refused = self._deliver(destination, spans) or 0
        except BatchRefusedError as error:
            self.counts.refused += len(spans)
            self._warn(str(error))
        except Exception as error:  # noqa: BLE001 - whatever it is, the spans are spooled and it is logged
            pause_s = RETRY_S[min(line.failures, len(RETRY_S) - 1)]
            line.retry_at = time.monotonic() + (error.retry_after_s if isinstance(error, BusyError) else pause_s)
            line.failures += 1
            self._warn(f"{type(error).__name__}: {error}; spans are spooled to {self._spool.folder}")
            return False
        else:
            self.counts.delivered += len(spans) - refused
            self.counts.refused += refused
            if refused:
                self._warn(f"{destination.url} will never take {refused} of {len(spans)}")
            line.failures = 0
        finally:
            self._trying = None
        return True

    def _replay(self) -> bool:
        """Deliver what is spooled until new spans fill a batch, or for `REPLAY_S`; True if more may be left."""
        until = time.monotonic() + REPLAY_S
        interrupted = False

        def interrupt() -> bool:
            nonlocal interrupted
            interrupted = self._abandoned or len(self._queue) >= BATCH_SIZE or time.monotonic() >= until
            return interrupted

        def ready(line: str) -> bool:
            return time.monotonic() >= self._lines[line].retry_at

        def send(url: str | None, key: str | None, spans: Sequence[Span]) -> bool:
            own = self._own if url == self._own.url else None
            destination = own if own is not None and key == OWN_KEY else Destination(url, key)
            if own is None and url is not None and (key == OWN_KEY or not destination.remote):  # of another process
                self._lines[line_of(url, key)].retry_at = math.inf
                return False
            if key == OWN_KEY and destination.key is None:
                self._warn(f"LIGHTNING_KEY is not set: what {self._spool.folder} holds for {url} waits there")
                self._lines[line_of(url, key)].retry_at = math.inf
                return False
            self.counts.retried += len(spans)
            return self._try(destination, spans)

        first = line_of(self._own.url, self._own.written_key)
        try:
            self._spool.replay(send, ready=ready, first=first, interrupt=interrupt)
        except OSError as error:  # what is waiting there continues to wait
            self._warn(f"the spool {self._spool.folder} can't be read: {error}")
        return interrupted

    def _abandon(self) -> None:
        """Spool what is left at the end, because a destination does not respond. A span sent twice is stored once."""
        self._abandoned = True
        rest = list(self._current)
        with self._lock:
            rest += self._group_by_destination(list(self._queue))
            self._queue.clear()
        hangs = self._trying
        for destination, spans in rest:
            # A hanging server must not delay the process's own store for ever: the next process may be
            # delayed by the same server.
            if hangs is None or not hangs.remote or destination.remote or not self._settle(destination, spans):
                self.counts.dropped += len(spans) - self._keep(destination, spans)

    def _warn(self, why: str) -> None:
        if time.monotonic() - self._warned_at >= 60.0:
            self._warned_at = time.monotonic()
            logger.warning("lightning: spans are not delivered: %s", without_secrets(why))


def _close_with_worker(sink: BatchSink) -> None:
    """Deliver what is pending at the end of a multiprocessing worker, which ends without `atexit`."""
    Finalize(None, sink.close, exitpriority=-100)  # last
