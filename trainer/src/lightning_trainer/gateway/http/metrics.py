"""Counters for ``GET /metrics``, in Prometheus' text format.

Each app has its own, so that several can exist at once.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.types import Receive, Scope, Send

from lightning_spans.errors import StoreError
from lightning_spans.record.stalls import stall_counts, stalls
from lightning_spans.schema.calls import Call
from lightning_trainer.gateway.http.asgi import send_bytes
from lightning_trainer.gateway.http.masking import masking_logger
from lightning_trainer.reasons.continuation import CONTINUATION, ContinuationReason, continued_share
from lightning_trainer.reasons.reason import slug

logger = masking_logger(__name__)
_FRESH_S: Final = 1.0
SENDER_OUTCOMES: Final = ("delivered", "spooled", "retried", "refused", "dropped", "sampled_out", "redacted")
_SENDERS_MOST: Final = 10_000
_SENDER_DIGITS: Final = 9  # largest accepted number; no process sends a billion spans
_TEXT: Final = b"text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """What this server did since its start."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        # Cached by their labels: finding one costs prometheus-client four times as much as counting.
        self._requests = cache(
            Counter("lightning_requests", "HTTP requests answered", ["path", "status"], registry=self.registry).labels
        )
        self._calls = cache(
            Counter("lightning_calls", "model calls recorded", ["outcome"], registry=self.registry).labels
        )
        self._tokens = cache(
            Counter("lightning_tokens", "tokens of recorded calls", ["kind"], registry=self.registry).labels
        )
        self._spans = Counter("lightning_spans", "spans received", ["outcome"], registry=self.registry)
        self._live_calls = Counter(
            "lightning_live_calls", "calls of production left out or masked", ["outcome"], registry=self.registry
        )
        self._prompts = Counter(
            "lightning_prompts",
            "prompts by whether they hold an earlier call's tokens",
            ["made"],
            registry=self.registry,
        )
        share = Gauge(
            "lightning_continued_share",
            "share of the calls that continue an earlier one and whose prompt contains its tokens",
            registry=self.registry,
        )
        share.set_function(lambda: continued_share(self._joined, self._alone) or 0.0)
        self._joined = self._alone = 0
        self._ends = Counter("lightning_attempts", "attempts by how they ended", ["status"], registry=self.registry)
        self._claims = Counter("lightning_claims", "attempts begun", registry=self.registry)
        self._leases = Counter("lightning_leases_lost", "leases that a runner lost", registry=self.registry)
        self._late = Counter(
            "lightning_results_refused", "ends of attempts whose lease was lost", registry=self.registry
        )
        self._senders = Counter(
            "lightning_sender_spans",
            "spans in the agents' processes by result, as reported by processes with such a key",
            ["outcome", "key"],
            registry=self.registry,
        )
        self._heard: OrderedDict[str, int] = OrderedDict()
        self.registry.register(_StallMetrics())
        self._read_queue: Callable[[], None] = lambda: None
        self._queue_read_s = -math.inf
        self._in_flight = Gauge("lightning_calls_in_flight", "model calls being answered", registry=self.registry)

    def request(self, path: str, status: int) -> None:
        """Count an answered request."""
        self._requests(path, str(status)).inc()

    def call(self, call: Call) -> None:
        """Count a recorded call and its tokens."""
        self._calls("ok" if call.error is None else "error").inc()
        self._prompt(call.sampling.get(CONTINUATION))
        self._tokens("prompt").inc(len(call.prompt_token_ids or ()))
        self._tokens("completion").inc(sum(len(choice.token_ids or ()) for choice in call.choices))

    def _prompt(self, made: object) -> None:
        if isinstance(made, str):
            self._prompts.labels(slug(made)).inc()
            self._joined += made == ContinuationReason.JOINED
            self._alone += made not in {ContinuationReason.JOINED, ContinuationReason.BEGINS}

    def spans(self, outcome: str, count: int) -> None:
        """Count spans by outcome: ``kept``, ``rejected``, ``refused`` (the sender will retry)."""
        if count:
            self._spans.labels(outcome).inc(count)

    def live_call(self, outcome: str, count: int) -> None:
        """Count calls of production by what the server did to their records: ``sampled_out``, ``redacted``."""
        if count:
            self._live_calls.labels(outcome).inc(count)

    def claimed(self, count: int) -> None:
        """Count attempts that a runner got."""
        self._claims.inc(count)

    def ended(self, status: str) -> None:
        """Count the end of an attempt. Released, disturbed and failed ones, among others, are retried."""
        self._ends.labels(status).inc()

    def leases_lost(self, count: int) -> None:
        """Count leases whose loss was reported to a runner."""
        self._leases.inc(count)

    def late_result(self) -> None:
        """Count a rejected end of an attempt whose lease was lost."""
        self._late.inc()

    def sender(self, told: str, scope: str, key: str) -> None:
        """Count what an agent's process reports about its spans: ``ID;report=3;dropped=1``, new since its report 2.

        A report that was counted is ignored, because a process that got no answer sends it again. So is anything in
        another format, because anybody with a key may send this. Numbers of reports are kept per key, so no key can
        change what another key's processes reported.
        """
        name, *pairs = told[:500].split(";")
        whose = f"{scope} {key} {name}"
        counts = {key: int(value) for key, _, value in (pair.partition("=") for pair in pairs) if _is_count(value)}
        report = counts.get("report", 0)
        if report <= self._heard.get(whose, 0):
            return
        for outcome in SENDER_OUTCOMES:
            if more := counts.get(outcome, 0):
                self._senders.labels(outcome, scope).inc(more)
        self._heard[whose] = report
        self._heard.move_to_end(whose)
        while len(self._heard) > _SENDERS_MOST:
            self._heard.popitem(last=False)

    @contextmanager
    def in_flight(self) -> Iterator[None]:
        """Count a call as being answered within the block."""
        self._in_flight.inc()
        try:
            yield
        finally:
            self._in_flight.dec()

    def watch_queue(self, backlog: Callable[[], tuple[int, float]]) -> None:
        """Show how many rollouts wait and how long, for autoscaling; `backlog` reads both from the store."""
        gauges = [
            Gauge("lightning_queued_rollouts", "rollouts that wait for a runner", registry=self.registry),
            Gauge("lightning_queue_wait_seconds", "wait of the oldest queued rollout", registry=self.registry),
        ]

        def read() -> None:
            for gauge, value in zip(gauges, backlog(), strict=True):
                gauge.set(value)

        self._read_queue = read

    async def _refresh_queue(self) -> None:
        """Read the queue, at most once a second: the page needs no key."""
        if time.monotonic() - self._queue_read_s < _FRESH_S:
            return
        self._queue_read_s = time.monotonic()
        try:
            await asyncio.to_thread(self._read_queue)
        except StoreError as error:
            logger.warning("the queue can't be read, so its metrics are those of the last time: %s", error)

    async def page(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - the ASGI signature
        """Answer ``GET /metrics``."""
        await self._refresh_queue()
        await send_bytes(send, generate_latest(self.registry), kind=_TEXT)


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= _SENDER_DIGITS


class _StallMetrics(Collector):
    """The stalls that `lightning_spans.record.stalls` has reported in this process, and the current ones."""

    def collect(self) -> Iterable[Metric]:
        told = CounterMetricFamily("lightning_stalls", "waits that outlasted their bound", labels=["part"])
        for part, count in stall_counts().items():
            told.add_metric([part], count)
        now = GaugeMetricFamily("lightning_stalled_seconds", "longest wait over its bound now", labels=["part"])
        longest = {stall.part: stall.seconds for stall in reversed(stalls())}
        for part, seconds in longest.items():
            now.add_metric([part], seconds)
        return [told, now]
