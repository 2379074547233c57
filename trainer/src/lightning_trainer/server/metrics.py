"""Counters for ``GET /metrics``, in Prometheus' text format. Each app has its own, so that several can live at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from starlette.types import Receive, Scope, Send

from lightning_trainer.account import BEGINS, CONTINUATION, JOINED, joined_share, slug
from lightning_trainer.server.draft import Draft
from lightning_trainer.server.wire import send_bytes

_TEXT: Final = b"text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """What this server did since its start."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "lightning_requests", "HTTP requests answered", ["path", "status"], registry=self.registry
        )
        self._calls = Counter("lightning_calls", "model calls recorded", ["outcome"], registry=self.registry)
        self._tokens = Counter("lightning_tokens", "tokens of recorded calls", ["kind"], registry=self.registry)
        self._spans = Counter("lightning_spans", "spans received", ["outcome"], registry=self.registry)
        self._prompts = Counter(
            "lightning_prompts",
            "prompts by whether they hold an earlier call's tokens",
            ["made"],
            registry=self.registry,
        )
        share = Gauge(
            "lightning_joined_share",
            "share of the calls that go on from an earlier one whose prompt holds its tokens",
            registry=self.registry,
        )
        share.set_function(lambda: joined_share(self._joined, self._alone) or 0.0)
        self._joined = self._alone = 0
        self._in_flight = Gauge("lightning_calls_in_flight", "model calls being answered", registry=self.registry)

    def request(self, path: str, status: int) -> None:
        """Count an answered request."""
        self._requests.labels(path, str(status)).inc()

    def call(self, draft: Draft, error: str | None) -> None:
        """Count a recorded call and its tokens."""
        self._calls.labels("ok" if error is None else "error").inc()
        self._prompt(draft.sampling.get(CONTINUATION))
        self._tokens.labels("prompt").inc(len(draft.prompt_token_ids or ()))
        self._tokens.labels("completion").inc(sum(len(choice.token_ids or ()) for choice in draft.choices))

    def _prompt(self, made: object) -> None:
        if isinstance(made, str):
            self._prompts.labels(slug(made)).inc()
            self._joined += made == JOINED
            self._alone += made not in {JOINED, BEGINS}

    def spans(self, outcome: str, count: int) -> None:
        """Count spans by what became of them: ``kept``, ``rejected``, ``refused`` (the sender will try again)."""
        if count:
            self._spans.labels(outcome).inc(count)

    @contextmanager
    def in_flight(self) -> Iterator[None]:
        """Count a call as being answered inside the block."""
        self._in_flight.inc()
        try:
            yield
        finally:
            self._in_flight.dec()

    async def page(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - the ASGI signature
        """Answer ``GET /metrics``."""
        await send_bytes(send, generate_latest(self.registry), kind=_TEXT)
