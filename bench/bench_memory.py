"""Memory of the gateway over 100,000 calls: all surfaces, half of them streams, ten calls to an attempt.

The app is called without a network, over a scripted engine and a store that keeps nothing, so that what grows is the
gateway's own. Calls that go on from one another make it remember prompts, responses and attempts.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import resource
from pathlib import Path
from typing import Any

import tests_path  # noqa: F401 - for fakes.py
from figures import Figure, choose_size

CALLS = int(os.environ.get("BENCH_CALLS", choose_size("100000", "400")))
WARM = CALLS // 4
USER = [{"role": "user", "content": "What is the answer? " * 5}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": USER},
    "/v1/completions": {"prompt": "Once upon a time"},
    "/v1/responses": {"input": USER},
    "/v1/messages": {"messages": USER, "max_tokens": 50},
}


def measure() -> list[Figure]:
    early, late = asyncio.run(_run())
    note = f"between call {WARM:,} and call {CALLS:,}, all surfaces, half of them streams, ten calls to an attempt"
    return [
        Figure(what="gateway's memory, grown", value=late - early, unit="MiB", note=note),
        Figure(what="gateway's memory", value=late, unit="MiB", note=f"after {CALLS:,} calls"),
    ]


async def _run() -> tuple[float, float]:
    from lightning_spans.store.null import NullStore
    from lightning_trainer.gateway.app import create_app
    from lightning_trainer.gateway.auth.keys import Keys
    from support.fakes import Attempts, FakeEngine, run_attempt

    engine, keys = FakeEngine(lambda _: "a short answer"), Keys.fresh()
    app = create_app(Attempts(NullStore()), keys=keys, engine=engine)
    early = 0.0
    for number in range(0, CALLS, 10):
        attempt = f"attempt {number}"
        run_attempt(app, attempt)
        key = keys.issue("attempt", rollout_id="r", attempt_id=attempt, fence=1)
        for turn in range(10):
            path, body = list(BODIES.items())[turn % len(BODIES)]
            body = {"model": "policy", **body, "stream": turn % 2 == 0}
            await asyncio.create_task(_call(app, path, body, key))  # a task for each, as the server has
        app.state.forget(attempt)
        engine.prompts.clear()
        engine.samplings.clear()
        if number == WARM - WARM % 10:
            early = _rss_mib()
    return early, _rss_mib()


async def _call(app: Any, path: str, body: dict[str, Any], key: str) -> None:
    sent = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
    gone, status = asyncio.Event(), 0

    async def receive() -> Any:
        if sent:
            return sent.pop()
        await gone.wait()
        return None

    async def send(message: Any) -> None:
        nonlocal status
        status = message.get("status", status)

    headers = [
        (b"authorization", f"Bearer {key}".encode()),
        (b"traceparent", b"00-" + b"a" * 32 + b"-" + b"b" * 16 + b"-01"),
    ]
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b""}
    await app(scope, receive, send)
    if status != 200:
        raise RuntimeError(f"{path} was answered {status}")


def _rss_mib() -> float:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


if __name__ == "__main__":
    for figure in measure():
        print(f"{figure.what:28} {figure.value:8.1f} {figure.unit}  {figure.note}")
