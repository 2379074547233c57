"""How a batch of spans reaches its destination: the process's own store, or a server that takes OTLP."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from lightning_spans.errors import StoreGoneError
from lightning_spans.record.delivery.http import Posts
from lightning_spans.record.delivery.otlp import PROTOBUF, count_rejected_spans, encode
from lightning_spans.record.delivery.outbox import OWN_KEY
from lightning_spans.record.delivery.reports import Reports
from lightning_spans.record.process import in_child
from lightning_spans.schema.rewards import Reward
from lightning_spans.schema.spans import Span
from lightning_spans.store.urls import absolute

if TYPE_CHECKING:
    from lightning_spans.store import Store

logger = logging.getLogger("lightning_spans")
_OWN: Final = "store:"


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a batch goes.

    Attributes:
        url: an OTLP/HTTP endpoint; `own_store` or None: the process's own store.
        key: bearer key; None: none is sent.
        own: whether this process was given this store and its key.
    """

    url: str | None = None
    key: str | None = None
    own: bool = False

    @property
    def written_key(self) -> str | None:
        """The key that is written to disk with a batch: an attempt's key is written, a live key is not."""
        return OWN_KEY if self.own and self.key is not None else self.key

    @property
    def remote(self) -> bool:
        """Whether the destination is a server."""
        return self.url is not None and not self.url.startswith(_OWN)


def own_store(store: str) -> str:
    """Return a process's own store as a destination, for which only its own batches are spooled.

    Contains no password.
    """
    named = absolute(store).removeprefix("sqlite:///")
    return _OWN + hashlib.sha256(named.encode()).hexdigest()[:16]


class BatchRefusedError(Exception):
    """The destination will never take this batch (4xx), so it is not spooled."""


class BusyError(Exception):
    """The destination will take this batch later, after a stated time."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Delivery:
    """Sends batches: to the process's own store, or as OTLP over HTTP.

    Args:
        store: opens the process's own store when a span first needs it.
        collector: the user's own endpoint, which gets the headers that the user configured for it.
    """

    def __init__(self, store: Callable[[], Store], collector: str | None = None) -> None:
        self._open_store = store
        self._collector = collector
        self._store: Store | None = None
        self._send = Posts(timeout_s=10.0)
        self._parents: tuple[Posts, Store | None] | None = None
        self.reports: Reports | None = None  # sent with each request: the counts of this process's spans
        in_child(self._begin_anew)

    def _begin_anew(self) -> None:
        """In a forked child, leave the store and the open connections to the parent.

        The store's thread does not run in the child.
        """
        self._parents, self._send, self._store = (self._send, self._store), Posts(timeout_s=10.0), None

    def __call__(self, destination: Destination, spans: Sequence[Span]) -> int:
        """Deliver one batch. Returns how many of its spans the server will never take.

        Raises:
            BatchRefusedError: the server answered 4xx (except 408 and 429).
            BusyError: it answered 503 or 429 with a time after which to retry.
            Exception: any other failure. The batch may be sent again, because delivery is idempotent.
        """
        if destination.url is None or not destination.remote:
            self._keep(lambda store: store.add_spans(spans))
            return 0
        return self._post(destination.url, destination.key, spans)

    def _keep(self, add: Callable[[Store], object]) -> None:
        store = self.store
        try:
            add(store)
        except StoreGoneError as error:
            logger.warning("lightning: %s A new one is begun.", error)
            if self._store is store:
                self._store = None
            store.close()
            add(self.store)

    @property
    def store(self) -> Store:
        """The process's own store, opened on first use."""
        if self._store is None:
            self._store = self._open_store()
        return self._store

    def add_rewards(self, rewards: Sequence[Reward]) -> None:
        """Write rewards to the process's own store."""
        self._keep(lambda store: store.add_rewards(rewards))

    def _post(self, url: str, key: str | None, spans: Sequence[Span]) -> int:
        headers = {"content-type": PROTOBUF, **({"authorization": f"Bearer {key}"} if key else {})}
        if url == self._collector:
            headers.update(_collector_headers())
        reports = self.reports if key else None  # other collectors get no counts
        if reports is not None:
            headers["x-lightning-sender"] = reports.text()
        status, about, said = self._send(url, encode(spans if key else _for_collector(spans)), headers)
        if status == 413 and len(spans) > 1:  # too large together
            middle = len(spans) // 2
            return self._half(url, key, spans[:middle]) + self._half(url, key, spans[middle:])
        if status in {429, 503} and about.get("retry-after", "").isdigit():
            raise BusyError(f"{url} answered {status}", float(about["retry-after"]))
        if 400 <= status < 500 and status not in {408, 429}:
            raise BatchRefusedError(f"{url} answered {status}: {said[:200].decode(errors='replace')}")
        if not 200 <= status < 300:
            raise OSError(f"{url} answered {status}")
        if reports is not None:
            reports.taken()
        return count_rejected_spans(said, about.get("content-type", ""))

    def _half(self, url: str, key: str | None, spans: Sequence[Span]) -> int:
        try:
            return self._post(url, key, spans)
        except BatchRefusedError:  # only for these; the others are taken
            return len(spans)

    def close(self) -> None:
        """Close the store and the connections."""
        self._send.close()
        if self._store is not None:
            self._store.close()


def _collector_headers() -> Mapping[str, str]:
    """Read the headers that OpenTelemetry's own exporter sends, such as a collector's key."""
    from opentelemetry.util.re import parse_env_headers

    variables = ("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "OTEL_EXPORTER_OTLP_HEADERS")
    return parse_env_headers(next((value for name in variables if (value := os.environ.get(name))), ""), liberal=True)


def _for_collector(spans: Sequence[Span]) -> list[Span]:
    """Return spans for the user's own collector, one that we have no key for, with what viewers read."""
    from lightning_spans.record.delivery.openinference import add_viewer_attributes

    return [add_viewer_attributes(span) for span in spans]
