"""A request that times out because the program blocked its own event loop says so."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from typing import Any, TextIO

import pytest

from lightning_spans.schema.attempts import Attempt
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
