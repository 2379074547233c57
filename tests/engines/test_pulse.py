"""The clock that shows that servers hang, and what a call that is cut meanwhile lost to them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from lightning_trainer.engines.vllm import pulse
from lightning_trainer.engines.vllm.pulse import Pulse
from lightning_trainer.gateway.engine import measure_wait


@pytest.fixture
def clock(monkeypatch):
    """Seconds that a test sets."""
    now = [1000.0]
    monkeypatch.setattr(pulse, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def test_silence_is_counted_while_requests_are_in_progress_and_until_something_arrives(clock):
    found = Pulse()
    for _ in range(2):  # each is given up after a minute
        with found.request():
            clock[0] += 60.0
        clock[0] += 500.0
    assert found.silent_s == 120.0
    with found.request():
        clock[0] += 30.0
        assert found.silent_s == 150.0
        found.beat()
        assert found.silent_s == 0.0
        clock[0] += 5.0
        assert found.silent_s == 5.0


async def cut_after(found, clock, seconds):
    """Return what a call lost that is cut after so many seconds."""
    begun = asyncio.Event()

    async def call():
        wait = measure_wait()
        try:
            with found.request(), found.noted_if_cut():
                begun.set()
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            return wait.seconds

    task = asyncio.create_task(call())
    await begun.wait()
    clock[0] += seconds
    task.cancel()
    return await task


async def test_a_call_that_is_cut_while_its_server_hangs_lost_that_time(clock):
    found = Pulse()
    assert await cut_after(found, clock, 60.0) == 60.0
    assert await cut_after(found, clock, 20.0) == 20.0, "not the time before it began"
    found.beat()
    assert await cut_after(found, clock, 5.0) == 0.0, "a server may be silent for a while"
