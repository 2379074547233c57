"""Spans into the store: straight, and as OTLP over HTTP from another process. Every span counted is on disk."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from figures import Figure
from records import chat_span

SPANS = 20_000
BATCH = 1_000
SENDERS = 4
OTHERS = "86-165 spans/s (agent-lightning 0.3, HTTP); OTel collector about 12,000/s/core"


def measure() -> list[Figure]:
    return [*straight(), *over_http()]


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
    return figures("store", f"{SPANS} chat spans of 1.5 KB, batches of {BATCH}, SQLite", cpu, wall)


def over_http() -> list[Figure]:
    from lightning_spans.store import open_store
    from lightning_trainer.server.app import create_app
    from lightning_trainer.server.keys import Keys
    from lightning_trainer.server.serving import ServerThread

    keys = Keys.fresh()
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(str(Path(folder) / "bench.db"))
        server = ServerThread(create_app(store, keys=keys))
        url = server.start()
        command = [sys.executable, __file__, f"{url}/v1/traces", keys.issue("admin")]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as sender:
            sender.stdout.readline()  # its bodies are encoded, and it has warmed the server up
            cpu, wall = time.process_time(), time.perf_counter()
            sender.stdin.write("go\n")
            sender.stdin.flush()
            sender.stdout.readline()
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        server.stop()
        check(len(store.spans()), SPANS + 1)
        store.close()
    how = f"the same as OTLP protobuf, {SENDERS} connections, sender in another process, answered when on disk"
    return figures("HTTP", how, cpu, wall)


def send(url: str, key: str) -> None:
    """The other process: send every span, once told to."""
    import httpx

    from lightning_spans.otlp import PROTOBUF, encode

    spans = [chat_span(number, trace=1 + number // 20) for number in range(SPANS)]
    bodies = [encode(spans[start : start + BATCH]) for start in range(0, SPANS, BATCH)]
    headers = {"authorization": f"Bearer {key}", "content-type": PROTOBUF}
    with httpx.Client(headers=headers, trust_env=False, timeout=60) as client:

        def post(body: bytes) -> None:
            client.post(url, content=body).raise_for_status()

        post(encode([chat_span(SPANS)]))
        print("ready", flush=True)
        sys.stdin.readline()
        with ThreadPoolExecutor(SENDERS) as pool:
            list(pool.map(post, bodies))
        print("done", flush=True)


def check(kept: int, sent: int) -> None:
    if kept != sent:
        raise RuntimeError(f"{kept} spans are in the store, not {sent}")


def figures(where: str, how: str, cpu_s: float, wall_s: float) -> list[Figure]:
    return [
        Figure(
            what=f"{where}, spans for each second of CPU",
            value=SPANS / cpu_s,
            unit="spans/s",
            goal=10_000,
            more_is_better=True,
            others=OTHERS,
            note=how,
        ),
        Figure(what=f"{where}, spans a second", value=SPANS / wall_s, unit="spans/s", others=OTHERS, note="wall"),
    ]


if __name__ == "__main__":
    send(*sys.argv[1:3])
