"""agentlightning 0.3.0's own store, server and client, in its own environment: rollouts, spans, a read. Prints JSON.

The store is the one in memory, which it uses by default and which is its fastest. Everything goes over HTTP, from this
process to a server in another, as in our benchmarks: rollouts are taken 64 at a time and ended one by one, which is
what its client has; spans come as OTLP protobuf, a thousand in a request, in the form that its own exporter sends.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

logging.disable(logging.CRITICAL)

ROLLOUTS, WORKERS, CLAIMED = 500, 16, 64
SPANS, BATCH = 10_000, 1_000
READ_ROLLOUTS, READ_CALLS = 64, 20
TEXT = "You are a careful assistant. Use the tools you are given, then answer in one line. " * 8


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def serve(port: int) -> None:
    from agentlightning.store import InMemoryLightningStore, LightningStoreServer

    server = LightningStoreServer(InMemoryLightningStore(thread_safe=True), host="127.0.0.1", port=port)
    await server.start()
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    os._exit(0)


@asynccontextmanager
async def client() -> AsyncIterator[tuple[object, int, int]]:
    from agentlightning.store import LightningStoreClient
    from portpicker import pick_unused_port

    port = pick_unused_port()
    command = [sys.executable, "-W", "ignore", __file__, str(port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        while process.stdout.readline().strip() != "ready":
            if process.poll() is not None:
                raise RuntimeError("the server did not start")
        store = LightningStoreClient(f"http://127.0.0.1:{port}")
        yield store, process.pid, port
        await store.close()
        process.stdin.close()


async def rollouts(store, pid: int) -> tuple[float, float]:
    from agentlightning.types import EnqueueRolloutRequest

    asked = [EnqueueRolloutRequest(input={"question": f"What is {n} + 7?"}) for n in range(ROLLOUTS)]
    await store.enqueue_many_rollouts(asked)

    async def work(worker: int) -> int:
        ended = 0
        while taken := await store.dequeue_many_rollouts(limit=CLAIMED, worker_id=f"w{worker}"):
            for one in taken:
                await store.update_attempt(one.rollout_id, one.attempt.attempt_id, status="succeeded")
            ended += len(taken)
        return ended

    cpu, wall = cpu_s(pid), time.perf_counter()
    ended = sum(await asyncio.gather(*(work(worker) for worker in range(WORKERS))))
    if ended != ROLLOUTS:
        raise RuntimeError(f"{ended} rollouts ended")
    return time.perf_counter() - wall, cpu_s(pid) - cpu


def bodies(rollout_id: str, attempt_id: str, first: int, count: int) -> bytes:
    """Spans of one attempt, as an OTLP request."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    request = ExportTraceServiceRequest()
    resource = request.resource_spans.add()
    ids = {"agentlightning.rollout_id": rollout_id, "agentlightning.attempt_id": attempt_id}
    for name, value in ids.items():
        attribute = resource.resource.attributes.add()
        attribute.key, attribute.value.string_value = name, value
    scope = resource.scope_spans.add()
    for number in range(first, first + count):
        span = scope.spans.add()
        span.trace_id, span.span_id = (1).to_bytes(16, "big"), (number + 1).to_bytes(8, "big")
        span.name = "openai.chat.completion"
        span.start_time_unix_nano = span.end_time_unix_nano = time.time_ns()
        order = span.attributes.add()
        order.key, order.value.int_value = "agentlightning.span_sequence_id", number + 1
        for name in ("request", "response"):
            attribute = span.attributes.add()
            attribute.key, attribute.value.string_value = name, TEXT
    return request.SerializeToString()


async def spans(store, pid: int, port: int) -> tuple[float, float]:
    import aiohttp

    started = await store.start_rollout(input={"q": 1})
    sent = [bodies(started.rollout_id, started.attempt.attempt_id, at, BATCH) for at in range(0, SPANS, BATCH)]
    cpu, wall = cpu_s(pid), time.perf_counter()
    async with aiohttp.ClientSession(headers={"content-type": "application/x-protobuf"}) as session:
        for body in sent:
            async with session.post(f"http://127.0.0.1:{port}/v1/traces", data=body) as answer:
                answer.raise_for_status()
    cpu, wall = cpu_s(pid) - cpu, time.perf_counter() - wall
    kept = len(await store.query_spans(started.rollout_id))
    if kept != SPANS:
        raise RuntimeError(f"{kept} of {SPANS} spans are kept")
    return wall, cpu


async def read(store, pid: int, port: int) -> tuple[float, float]:
    import aiohttp

    started = [await store.start_rollout(input={"q": n}) for n in range(READ_ROLLOUTS)]
    async with aiohttp.ClientSession(headers={"content-type": "application/x-protobuf"}) as session:
        for one in started:
            body = bodies(one.rollout_id, one.attempt.attempt_id, 0, READ_CALLS)
            async with session.post(f"http://127.0.0.1:{port}/v1/traces", data=body) as answer:
                answer.raise_for_status()
    cpu, wall = cpu_s(pid), time.perf_counter()
    found = await asyncio.gather(*(store.query_spans(one.rollout_id) for one in started))
    if sum(len(one) for one in found) != READ_ROLLOUTS * READ_CALLS:
        raise RuntimeError(f"{sum(len(one) for one in found)} spans were read")
    return time.perf_counter() - wall, cpu_s(pid) - cpu


async def main(part: str) -> None:
    async with client() as (store, pid, port):
        if part == "rollouts":
            wall, cpu = await rollouts(store, pid)
            found = {"rollouts": ROLLOUTS / wall, "rollouts_cpu": ROLLOUTS / cpu}
        elif part == "spans":
            wall, cpu = await spans(store, pid, port)
            found = {"spans": SPANS / wall, "spans_cpu": SPANS / cpu}
        else:
            wall, cpu = await read(store, pid, port)
            found = {"read": wall, "read_cpu": cpu}
    print(json.dumps(found))


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])) if sys.argv[1].isdigit() else main(sys.argv[1]))
