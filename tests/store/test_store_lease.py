"""Leases run by time that nobody can set: clocks that jump, machines that disagree, stores that rest."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_conformance.stores.samples import a_rollout
from lightning_spans.store.sql import lease
from lightning_spans.store.sql.lease import LeaseClock
from lightning_spans.store.sql.store import SqlStore

HOUR_NS = 3600 * 10**9


class Machine:
    """A machine whose monotonic clock and whose reading of the shared clock the test turns by hand."""

    def __init__(self) -> None:
        self.monotonic_ns = 10**9
        self.reading_ns = HOUR_NS

    def pass_s(self, seconds: float) -> None:
        self.monotonic_ns += int(seconds * 1e9)
        self.reading_ns += int(seconds * 1e9)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()

    class Time:
        monotonic_ns = staticmethod(lambda: machine.monotonic_ns)

    monkeypatch.setattr(lease, "time", Time)
    return machine


@pytest.fixture
def clock(tmp_path: Path, machine: Machine) -> Iterator[Callable[[], Callable[[], int]]]:
    """Return clocks of different processes that use one database: functions that give the agreed time."""
    store = SqlStore(f"sqlite:///{tmp_path}/s.db")
    database = replace(store._database, elapsing_ns=lambda _: machine.reading_ns)

    def join() -> Callable[[], int]:
        clock = LeaseClock(database)
        return lambda: store._writer.do(clock.tick)

    yield join
    store.close()


def test_one_process_trusts_its_own_monotonic_clock_alone(machine: Machine, clock: Any) -> None:
    tick = clock()
    begin = tick()
    machine.pass_s(5)
    machine.reading_ns += 24 * HOUR_NS
    assert tick() - begin == 5 * 10**9
    machine.pass_s(5000)
    machine.reading_ns -= 48 * HOUR_NS
    assert tick() - begin == 5005 * 10**9


def test_processes_in_turn_count_the_time_once(machine: Machine, clock: Any) -> None:
    one, other = clock(), clock()
    begin = one()
    other()
    for _ in range(10):
        machine.pass_s(1)
        one()
        machine.pass_s(1)
        now = other()
    assert now - begin == 20 * 10**9


@pytest.mark.parametrize("hours", [-1, 1, 1000])
def test_a_shared_clock_that_is_set_moves_leases_by_seconds_at_most(machine: Machine, clock: Any, hours: int) -> None:
    one, other = clock(), clock()
    begin = one()
    other()
    machine.pass_s(2)
    one()
    machine.reading_ns += hours * HOUR_NS
    machine.pass_s(2)
    assert 2 * 10**9 <= other() - begin <= 6 * 10**9  # 4 s have passed


def test_time_in_which_nobody_used_the_store_does_not_count(machine: Machine, clock: Any) -> None:
    begin = clock()()
    machine.pass_s(3 * 3600)
    assert clock()() == begin  # a server that was down: its runners could not report either


def test_time_never_goes_back(machine: Machine, clock: Any) -> None:
    one = clock()
    machine.pass_s(100)
    late = one()
    machine.reading_ns = 0
    assert clock()() >= late


def test_a_wall_clock_that_jumps_ends_no_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = SqlStore(f"sqlite:///{tmp_path}/s.db")
    store.enqueue([a_rollout()])
    store.claim("worker", lease_s=60.0)
    now = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: now() + 3600 * 10**9)  # a laptop wakes up
    assert store.claim("other") == []
    store.close()
    again = SqlStore(f"sqlite:///{tmp_path}/s.db")  # a server that starts with the wrong time
    assert again.claim("other") == []
    assert again.attempts()[0].status == "running"
    again.close()
