"""Group commit: who comes together is written together, and nobody waits for nobody."""

from __future__ import annotations

import asyncio
import threading

import pytest

from lightning_spans.errors import QueueFullError, StoreError
from lightning_spans.store.commit import GroupCommit
from lightning_trainer.gateway.ingest import writer as ingest
from lightning_trainer.gateway.ingest.writer import RecordWriter


class Counting:
    """A store that counts its transactions."""

    def __init__(self) -> None:
        self.batches: list[list[object]] = []

    def add_calls(self, calls):
        if "broken" in calls:
            raise StoreError("broken")
        self.batches.append(list(calls))
        return len(calls)

    def add_spans(self, spans):
        return len(spans)


def test_calls_that_are_answered_together_share_a_transaction(monkeypatch):
    monkeypatch.setattr(ingest, "_MOST_GATHER_S", float("inf"))  # a busy machine may pause between any two of them
    monkeypatch.setattr(ingest, "_GATHER_S", 1e6)
    store = Counting()
    writer = RecordWriter(store)
    gathering = threading.Event()
    writer.expected = lambda: gathering.set() or 64

    async def main():
        first = asyncio.ensure_future(writer.call(0))
        assert await asyncio.to_thread(gathering.wait, 60)  # alone so far, it waits for the others
        await asyncio.gather(first, *(writer.call(number) for number in range(1, 64)))

    asyncio.run(main())
    writer.close()
    assert [len(batch) for batch in store.batches] == [64]


def test_one_call_alone_waits_for_nobody(monkeypatch):
    """If it waited for company, that would be for ever."""
    monkeypatch.setattr(ingest, "_MOST_GATHER_S", float("inf"))
    monkeypatch.setattr(ingest, "_GATHER_S", 1e6)
    store = Counting()
    writer = RecordWriter(store)
    writer.expected = lambda: 1

    async def main():
        for number in range(3):
            await asyncio.wait_for(writer.call(number), 60)

    asyncio.run(main())
    writer.close()
    assert store.batches == [[0], [1], [2]]


def test_company_that_does_not_come_is_not_waited_for_for_ever():
    store = Counting()
    writer = RecordWriter(store)
    writer.expected = lambda: 1000
    asyncio.run(asyncio.wait_for(writer.call(1), 60))
    writer.close()
    assert store.batches == [[1]]


def test_what_gathers_when_the_server_stops_is_written():
    store = Counting()
    writer = RecordWriter(store)
    writer.expected = lambda: 1000

    async def main():
        waiting = asyncio.ensure_future(writer.call(1))
        await asyncio.sleep(0)
        writer.call_later(2)
        await asyncio.to_thread(writer.close)
        await waiting

    asyncio.run(main())
    assert [record for batch in store.batches for record in batch] == [1, 2]


def test_a_call_that_the_store_refuses_fails_alone():
    store = Counting()
    writer = RecordWriter(store)
    writer.expected = lambda: 3

    async def main():
        return await asyncio.gather(*(writer.call(one) for one in (1, "broken", 3)), return_exceptions=True)

    first, second, third = asyncio.run(main())
    writer.close()
    assert first is third is None
    assert isinstance(second, StoreError)


def test_a_store_that_refuses_for_long_is_told_once_and_once_more_when_it_takes_writes(caplog):
    store = Counting()
    writer = RecordWriter(store)

    async def main():
        for _ in range(5):
            with pytest.raises(StoreError):
                await writer.call("broken")
        await writer.call(1)

    asyncio.run(main())
    writer.close()
    assert [record.getMessage() for record in caplog.records] == [
        "the store refused 1 writes: StoreError: broken",
        "the store takes writes again; it refused 5",
    ]


def test_spans_that_find_no_room_are_refused_and_calls_are_not():
    held, go_on = threading.Event(), threading.Event()

    class Slow(Counting):
        def add_spans(self, spans):
            held.set()
            go_on.wait(60)
            return super().add_spans(spans)

    store = Slow()
    writer = RecordWriter(store, max_waiting_spans=10)

    async def main():
        first = asyncio.ensure_future(writer.spans([1] * 20))  # one that comes alone is always taken
        await asyncio.to_thread(held.wait, 10)
        with pytest.raises(QueueFullError, match="20 records wait"):
            await writer.spans([1])
        call = asyncio.ensure_future(writer.call(7))
        await asyncio.sleep(0)
        go_on.set()
        await asyncio.gather(first, call)
        await writer.spans([1] * 10)

    asyncio.run(main())
    writer.close()
    assert store.batches == [[7]]


def test_a_request_that_was_cancelled_is_written_and_harms_nobody():
    store = Counting()
    writer = RecordWriter(store)
    writer.expected = lambda: 3

    async def main():
        gone, stays = (asyncio.ensure_future(writer.call(number)) for number in (1, 2))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.gather(writer.call(3), stays)

    asyncio.run(main())
    writer.close()
    assert store.batches == [[1, 2, 3]]


def test_threads_and_loops_wait_for_the_same_commit():
    """What gathers while the first is done is done together, whoever waits for it."""
    started, go_on, batches = threading.Event(), threading.Event(), []

    def do_all(items):
        batches.append(sorted(items))
        started.set()
        go_on.wait(60)
        return [item * 2 if item != 3 else StoreError("three") for item in items]

    commits = GroupCommit(do_all, name="test", closed="closed")

    async def main():
        first = asyncio.ensure_future(commits.wait(1))
        await asyncio.to_thread(started.wait, 10)
        others = [asyncio.to_thread(commits.do, 2), asyncio.to_thread(commits.do, 3), commits.wait(4)]
        rest = [asyncio.ensure_future(other) for other in others]
        while commits.gathered < 3:
            await asyncio.sleep(0.001)
        go_on.set()
        return [await first, *await asyncio.gather(*rest, return_exceptions=True)]

    one, two, three, four = asyncio.run(main())
    commits.close()
    assert (one, two, four, str(three)) == (2, 4, 8, "three")
    assert batches == [[1], [2, 3, 4]]
    with pytest.raises(StoreError, match="closed"):
        commits.do(5)
