"""What the gateway could be made of: servers, clients and parsers, measured as parts of one bare relay.

Each relay is a process of its own over the same scripted model server and is asked the same requests in turns. The
first is what the gateway uses; each other one differs from it in one part.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import statistics
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import bench_gateway as gateway
from figures import Figure, choose_size, measure_in_rounds

CASE = gateway.CASES[choose_size(1, 0)]
ROUNDS = choose_size(5, 1)
RELAYS = {  # server, event loop, client
    "uvicorn, httptools, uvloop, aiohttp": ("httptools", "uvloop", "aiohttp"),
    "the same with asyncio's loop": ("httptools", "asyncio", "aiohttp"),
    "the same with h11": ("h11", "uvloop", "aiohttp"),
    "the same with httpx": ("httptools", "uvloop", "httpx"),
    "the same with granian": ("granian", "uvloop", "aiohttp"),
}


def measure() -> list[Figure]:
    return [*_relays(), *_parsers()]


def _relays() -> list[Figure]:
    found: dict[str, list[float]] = {name: [] for name in RELAYS}
    with gateway._Process("upstream", str(CASE.tokens)) as upstream:
        relays = {name: _Relay(":".join(parts), upstream.url) for name, parts in RELAYS.items()}
        try:
            for relay in relays.values():
                gateway._client(relay, gateway.AT_ONCE, CASE)
            for _ in range(ROUNDS):
                for name, relay in relays.items():
                    found[name].append(gateway._cpu_ms(relay, CASE))
        finally:
            for relay in relays.values():
                relay.__exit__()
    note = f"{ROUNDS} x {gateway.REQUESTS} calls, {gateway.AT_ONCE} at once, 51 KB from upstream, whole"
    return [Figure(what=name, value=statistics.median(times), unit="ms", note=note) for name, times in found.items()]


def _parsers() -> list[Figure]:
    import orjson

    body = gateway.reply(CASE.tokens)
    data = orjson.loads(body)
    cases: dict[str, Callable[[], Any]] = {
        "orjson, read": lambda: orjson.loads(body),
        "json, read": lambda: json.loads(body),
        "orjson, write": lambda: orjson.dumps(data),
        "json, write": lambda: json.dumps(data),
    }
    times = measure_in_rounds(cases, rounds=choose_size(200, 2))
    return [
        Figure(what=name, value=1000 * seconds, unit="ms", note="a reply of 51 KB") for name, seconds in times.items()
    ]


class _Relay(gateway._Process):
    """A relay of this file in a process of its own."""

    file = __file__


def serve(parts: str, upstream: str) -> None:
    """The other process: serve until the input ends."""
    server, loop, client = parts.split(":")
    app = gateway._asgi(*(_httpx(upstream) if client == "httpx" else gateway.forwarding(upstream)))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    run = _granian if server == "granian" else _uvicorn
    threading.Thread(target=run, args=(app, port, server, loop), daemon=True).start()
    while True:
        with socket.socket() as trying:
            if trying.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.05)
    gateway.tell(f"http://127.0.0.1:{port}", "none")
    os._exit(0)  # neither server stops well from another thread


def _uvicorn(app: Any, port: int, http: str, loop: str) -> None:
    import uvicorn

    uvicorn.run(app, port=port, http=http, loop=loop, access_log=False, log_level="warning")


def _granian(app: Any, port: int, _server: str, loop: str) -> None:
    import uvloop
    from granian.constants import Interfaces
    from granian.server.embed import Server

    served = Server(app, port=port, interface=Interfaces.ASGI, log_enabled=False)
    runner = uvloop.run if loop == "uvloop" else asyncio.run
    runner(served.serve())


def _httpx(upstream: str) -> tuple[Any, Any]:
    import httpx

    clients: list[httpx.AsyncClient] = []

    async def forward(_scope: Any, sent: bytes) -> AsyncIterator[bytes]:
        if not clients:
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
            clients.append(httpx.AsyncClient(limits=limits, trust_env=False, timeout=60))
        headers = {"content-type": "application/json"}
        yield (await clients[0].post(f"{upstream}/v1/chat/completions", content=sent, headers=headers)).content

    async def close() -> None:
        for one in clients:
            await one.aclose()

    return forward, close


if __name__ == "__main__":
    if len(sys.argv) > 1:
        serve(sys.argv[1], sys.argv[2])
    else:
        for figure in measure():
            print(f"{figure.what:40} {figure.value:8.3f} {figure.unit}")
