"""Spans into the store: straight, and as OTLP over HTTP from another process. Every span counted is on disk."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from figures import Figure
from records import chat_span

SPANS = 20_000
BATCH = 1_000


def measure() -> list[Figure]:
    return [*straight()]


def straight() -> list[Figure]:
    from lightning_spans.store import open_store

    spans = [chat_span(number, trace=number // 20) for number in range(SPANS)]
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(str(Path(folder) / "bench.db"))
        store.add_spans([chat_span(SPANS)])  # imports and tables
        cpu, wall = time.process_time(), time.perf_counter()
        for start in range(0, SPANS, BATCH):
            store.add_spans(spans[start : start + BATCH])
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        kept = len(store.spans())
        store.close()
    if kept != SPANS + 1:
        raise RuntimeError(f"{kept} spans are in the store, not {SPANS + 1}")
    how = f"{SPANS} chat spans of 1.5 KB, batches of {BATCH}, SQLite"
    others = "86-165 spans/s (agent-lightning 0.3, HTTP); OTel collector about 12,000/s/core"
    return [
        Figure(
            what="store, spans a second of CPU",
            value=SPANS / cpu,
            unit="spans/s",
            goal=10_000,
            more_is_better=True,
            others=others,
            note=how,
        ),
        Figure(what="store, spans a second", value=SPANS / wall, unit="spans/s", others=others, note=f"{how}; wall"),
    ]
