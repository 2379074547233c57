"""Group commit: who comes together is written together, and nobody waits for nobody."""

from __future__ import annotations

import asyncio

from lightning_spans.errors import StoreError
from lightning_trainer.server.writer import Writer


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


def test_calls_that_are_answered_together_share_a_transaction():
    store = Counting()
    writer = Writer(store)
    writer.expected = lambda: 64

    async def main():
        await asyncio.gather(*(writer.call(number) for number in range(64)))

    asyncio.run(main())
    writer.close()
    assert [len(batch) for batch in store.batches] == [64]


def test_one_call_alone_waits_for_nobody():
    """No timer is set for it: it is handed over at once."""
    store = Counting()
    writer = Writer(store)
    writer.expected = lambda: 1

    async def main():
        loop = asyncio.get_running_loop()
        timers = []
        loop.call_later = lambda *args: timers.append(args)  # what would let it wait
        await writer.call(1)
        assert not timers

    asyncio.run(main())
    writer.close()


def test_company_that_does_not_come_is_not_waited_for_for_ever():
    store = Counting()
    writer = Writer(store)
    writer.expected = lambda: 1000
    asyncio.run(asyncio.wait_for(writer.call(1), 10))
    writer.close()
    assert store.batches == [[1]]


def test_what_gathers_when_the_server_stops_is_written():
    store = Counting()
    writer = Writer(store)
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
    writer = Writer(store)
    writer.expected = lambda: 3

    async def main():
        return await asyncio.gather(*(writer.call(one) for one in (1, "broken", 3)), return_exceptions=True)

    first, second, third = asyncio.run(main())
    writer.close()
    assert first is third is None
    assert isinstance(second, StoreError)
