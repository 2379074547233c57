"""Spans into the store: straight, and as OTLP over HTTP from another process. Every span counted is on disk.

    python bench/bench_ingest.py million [SQLite|PostgreSQL]

sends a million and prints the server's memory on the way: it must not grow.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from agl import others
from figures import Figure, choose_size
from records import chat_span
from served import DATABASES, RunningServer, server

SPANS = choose_size(20_000, 2_000)
BATCH = choose_size(1_000, 200)
SENDERS = 4
ELSEWHERE = "86-165 spans/s (agent-lightning 0.3, its exporter); OTel collector about 12,000/s/core"


def measure() -> list[Figure]:
    figures = straight()
    for kind in DATABASES:
        figures += over_http(kind)
    return figures


def straight() -> list[Figure]:
    from lightning_spans.store import open_store

    spans = [chat_span(number, trace=1 + number // 20) for number in range(SPANS)]
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(str(Path(folder) / "bench.db"))
        store.add_spans([chat_span(SPANS)])  # imports and tables
        cpu, wall = time.process_time(), time.perf_counter()
        for start in range(0, SPANS, BATCH):
            store.add_spans(spans[start : start + BATCH])
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        check(len(store.spans()), SPANS + 1)
        store.close()
    how = f"{SPANS} chat spans of 1.5 KB, batches of {BATCH}, SQLite, no server"
    return figures("store", how, cpu, wall, ELSEWHERE, ELSEWHERE)


def over_http(kind: str) -> list[Figure]:
    sent = list(bodies(SPANS))
    with server(kind) as served:
        post(served, sent[:1])  # imports
        cpu, wall = served.cpu_s(), time.perf_counter()
        post(served, sent[1:])
        cpu, wall = served.cpu_s() - cpu, time.perf_counter() - wall
        check(count_spans(served), SPANS)
    done = (len(sent) - 1) / len(sent)
    how = f"OTLP protobuf, {SENDERS} connections, CPU of the server and its database, answered when on disk"
    mine = [others(name, "spans/s", ELSEWHERE) for name in ("spans_cpu", "spans")]
    return figures(f"HTTP, {kind}", how, cpu / done, wall / done, *mine)


def bodies(count: int, first: int = 0) -> Iterator[bytes]:
    from lightning_spans.record.delivery.otlp import encode

    for start in range(first, first + count, BATCH):
        yield encode(chat_span(number, trace=1 + number // 20) for number in range(start, start + BATCH))


def post(served: RunningServer, sent: list[bytes]) -> None:
    import httpx

    from lightning_spans.record.delivery.otlp import PROTOBUF

    headers = {"authorization": f"Bearer {served.key}", "content-type": PROTOBUF}
    with httpx.Client(headers=headers, trust_env=False, timeout=60) as client:

        def send(body: bytes) -> None:
            while (answer := client.post(f"{served.url}/v1/traces", content=body)).status_code == 503:
                time.sleep(float(answer.headers["retry-after"]))  # told to come back: nothing was kept
            answer.raise_for_status()

        with ThreadPoolExecutor(SENDERS) as pool:
            list(pool.map(send, sent))


def count_spans(served: RunningServer) -> int:
    from lightning_spans.store.http import HttpStore

    store = HttpStore(served.url, key=served.key)
    found = len(store.spans())
    store.close()
    return found


def check(found: int, sent: int) -> None:
    if found != sent:
        raise RuntimeError(f"{found} spans are in the store, not {sent}")


def figures(where: str, how: str, cpu_s: float, wall_s: float, others_cpu: str, others_wall: str) -> list[Figure]:
    return [
        Figure(
            what=f"{where}, spans for each second of CPU",
            value=SPANS / cpu_s,
            unit="spans/s",
            goal=10_000,
            more_is_better=True,
            others=others_cpu,
            note=how,
        ),
        Figure(what=f"{where}, spans a second", value=SPANS / wall_s, unit="spans/s", others=others_wall, note="wall"),
    ]


def million(kind: str) -> None:
    with server(kind) as served:
        begun, cpu = time.perf_counter(), served.cpu_s()
        for part in range(20):
            post(served, list(bodies(50_000, first=part * 50_000)))
            print(f"{(part + 1) * 50_000:>9,} spans: server {served.memory_mib():.0f} MiB", flush=True)
        wall, cpu = time.perf_counter() - begun, served.cpu_s() - cpu
        print(f"{1e6 / cpu:,.0f} spans for each second of CPU of server and database; {wall:.0f} s with the sender's")


if __name__ == "__main__":
    million(*sys.argv[2:])
