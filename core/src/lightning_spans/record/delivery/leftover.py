"""Delivers what ended processes left in the spool, from a process in which nothing is attached."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_spans.record.delivery.deliver import Delivery
from lightning_spans.record.delivery.outbox import Spool, default_spool
from lightning_spans.record.delivery.sink import DETACH_S, BatchSink

if TYPE_CHECKING:
    from lightning_spans.store import Store


def deliver_left(timeout_s: float) -> bool:
    """Deliver what other processes left in the spool; False if the time ran out."""
    spool = Spool(default_spool())
    if not (spool.pending() or spool.journals()):
        return True
    delivery = Delivery(_open_no_store)
    sink = BatchSink(delivery, route=lambda _: (), spool=spool, finish=delivery.close)
    try:
        return sink.flush(timeout_s)
    finally:
        sink.close(DETACH_S)


def _open_no_store() -> Store:
    raise LookupError("spans for another store are delivered by the program that uses that store")
