"""A request that times out because the program blocked its own event loop says so."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, TextIO

import pytest

from lightning_spans.schema.attempts import Attempt
from lightning_trainer.runner.worker import watchdog
from lightning_trainer.runner.worker.execution import execute
from lightning_trainer.runner.worker.watchdog import LoopWatch

ATTEMPT = Attempt(rollout_id="r", attempt_id="r.1", endpoint="http://127.0.0.1:9", key="k", agents=("*",))


@pytest.fixture
async def told() -> Iterator[TextIO]:  # type: ignore[misc]
    """What a watch of this loop reports, a line each."""
    reader, writer = os.pipe()
    watch = LoopWatch(writer, lambda _: None)
    with os.fdopen(reader) as lines:
        yield lines
        watch.close()


async def _times_out(task: dict[str, Any], _: object) -> float:
    async with asyncio.timeout(0.05):
        if task["blocks"]:
            next(line for line in task["told"]() if json.loads(line))
        await asyncio.Event().wait()
    return 1.0


async def test_timeout_of_a_blocked_loop_names_the_line_that_blocked_it(told: TextIO) -> None:
    late = await execute(_times_out, None, {"blocks": True, "told": lambda: told}, ATTEMPT, needs_reward=True)
    assert late.status == "failed"
    last = (late.error or "").splitlines()[-1]
    assert last.startswith("TimeoutError. Meanwhile ")
    assert "test_blocked_loop.py:" in last
    assert "in <genexpr> blocked the event loop" in last
    assert "make run() synchronous" in last
    own = await execute(_times_out, None, {"blocks": False}, ATTEMPT, needs_reward=True)
    assert (own.error or "").splitlines()[-1] == "TimeoutError", "nothing was blocked meanwhile"


async def test_time_without_a_free_core_is_not_the_programs(monkeypatch: pytest.MonkeyPatch, told: TextIO) -> None:
    """On a machine with more work than cores, a worker that imports its client may not run for many seconds."""
    began = time.monotonic()
    monkeypatch.setattr(watchdog, "core_wait_s", lambda _thread: time.monotonic() - began)
    starved = next(block for line in told if (block := json.loads(line)))
    assert starved["seconds"] < 0.5
    assert "test_blocked_loop.py:" in starved["where"]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells how long a thread waited for a core")
def test_a_thread_that_shares_its_core_waits_for_it() -> None:
    own, cores = threading.get_native_id(), os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        before = watchdog.core_wait_s(own)
        with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:  # on this core, too
            while watchdog.core_wait_s(own) < before + 0.05:
                pass
            other.kill()
    finally:
        os.sched_setaffinity(0, cores)
    assert watchdog.core_wait_s(-1) == 0.0
