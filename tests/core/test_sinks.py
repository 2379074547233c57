from __future__ import annotations

import logging
import os
import threading

import pytest

from lightning_spans.record.delivery.deliver import BatchRefusedError, Destination
from lightning_spans.record.delivery.outbox import Spool
from lightning_spans.record.delivery.sink import BatchSink
from lightning_spans.schema.attempts import Attempt
from lightning_spans.schema.spans import Span


def make(number: int) -> Span:
    return Span(
        operation="chat", name="m", trace_id=f"{1:032x}", span_id=f"{number + 1:016x}", start_ns=number, end_ns=number
    )


class Receiver:
    """Takes batches; can be told to fail or to wait."""

    def __init__(self):
        self.got: list[tuple[Destination, Span]] = []
        self.error: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, destination, spans):
        self.gate.wait(60)
        if self.error:
            raise self.error
        self.got += [(destination, span) for span in spans]

    @property
    def ids(self):
        return [int(span.span_id, 16) - 1 for _, span in self.got]


@pytest.fixture
def receiver():
    return Receiver()


@pytest.fixture
def spool(tmp_path):
    return Spool(tmp_path / "spool")


@pytest.fixture
def sink(receiver, spool):
    sink = BatchSink(
        receiver,
        route=lambda attempt: [Destination(attempt and attempt.endpoint, attempt and attempt.key)],
        spool=spool,
    )
    yield sink
    receiver.gate.set()
    sink.close()


def test_everything_is_delivered_once_in_order(sink, receiver):
    for number in range(2000):
        sink.put(make(number), None)
    assert sink.flush(60)
    assert receiver.ids == list(range(2000))


def test_each_attempts_spans_go_to_its_own_endpoint_with_its_own_key(sink, receiver):
    for number in range(10):
        sink.put(make(number), Attempt("r", f"a{number % 2}", endpoint="http://x", key=f"key{number % 2}"))
    assert sink.flush(60)
    assert {(d.key, int(s.span_id, 16) % 2) for d, s in receiver.got} == {("key0", 1), ("key1", 0)}


def test_put_does_not_wait_for_a_receiver_that_hangs(sink, receiver):
    receiver.gate.clear()
    for number in range(1000):
        sink.put(make(number), None)  # would hang here
    assert not sink.flush(0.2)
    receiver.gate.set()
    assert sink.flush(60)
    assert receiver.ids == list(range(1000))


def test_what_can_not_be_delivered_is_spooled_and_delivered_later(sink, receiver, spool, caplog):
    receiver.error = ConnectionError("down")
    with caplog.at_level(logging.WARNING, logger="lightning_spans"):
        for number in range(600):
            sink.put(make(number), None)
        assert sink.flush(60)
    assert "down" in caplog.text
    assert (sink.counts.delivered, sink.counts.spooled, sink.counts.dropped) == (0, 600, 0)
    assert spool.pending() > 0
    receiver.error = None
    sink._lines.clear()  # the time to try again has come
    sink.put(make(600), None)
    assert sink.flush(60)
    assert receiver.ids == list(range(601))  # in order
    assert spool.pending() == 0


def test_the_next_process_delivers_what_the_last_one_spooled(receiver, spool):
    assert spool.append(None, None, [make(1), make(2)]) == 2
    sink = BatchSink(receiver, route=lambda attempt: [Destination()], spool=Spool(spool.folder))
    sink.put(make(3), None)
    assert sink.flush(60)
    assert receiver.ids == [1, 2, 3]
    sink.close()


def test_what_the_last_process_spooled_is_delivered_without_a_span_of_ones_own(receiver, spool):
    spool.append("http://a/v1/traces", "k", [make(0)])
    later = BatchSink(receiver, route=lambda _: [], spool=spool)
    for _ in range(200):
        if receiver.ids:
            break
        threading.Event().wait(0.05)
    later.close()
    assert receiver.ids == [0]


def test_what_the_other_side_will_never_take_is_counted_and_not_tried_again(sink, receiver, spool, caplog):
    receiver.error = BatchRefusedError("401: expired key")
    with caplog.at_level(logging.WARNING, logger="lightning_spans"):
        sink.put(make(1), None)
        assert sink.flush(60)
    assert (sink.counts.refused, spool.pending()) == (1, 0)
    assert "expired key" in caplog.text


def test_a_full_queue_drops_counts_and_says_so(receiver, spool, caplog):
    receiver.gate.clear()
    sink = BatchSink(receiver, route=lambda attempt: [Destination()], spool=spool, queue_size=10)
    with caplog.at_level(logging.WARNING, logger="lightning_spans"):
        for number in range(2000):
            sink.put(make(number), None)
    assert sink.counts.dropped >= 1000
    assert sink.counts.dropped + sink.counts.put == 2000
    assert "queue is full" in caplog.text
    receiver.gate.set()
    sink.close()
    assert len(receiver.got) == sink.counts.put


def test_close_delivers_what_is_pending(sink, receiver):
    sink.put(make(1), None)
    sink.close()
    assert receiver.ids == [1]


def test_spans_that_come_when_no_thread_can_be_started_are_spooled_at_the_end(sink, receiver, spool, monkeypatch):
    """As in a process that ends, since Python 3.12: a stream that nobody closed is told of then."""

    def refuse():
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(sink._thread, "start", refuse)
    sink.put(make(0), None)
    sink.close()
    assert (receiver.got, sink.counts.spooled, spool.pending()) == ([], 1, 1)


def test_what_it_delivers_with_is_closed_after_the_last_delivery(receiver, spool):
    done = []
    sink = BatchSink(
        receiver, route=lambda _: [Destination()], spool=spool, finish=lambda: done.append(len(receiver.got))
    )
    sink.put(make(0), None)
    sink.close()
    assert done == [1]


def test_a_forked_child_delivers_its_own_spans(tmp_path):
    spool = Spool(tmp_path / "spool")

    def deliver(destination, spans):
        (tmp_path / f"{os.getpid()}").write_text(",".join(span.span_id for span in spans))

    sink = BatchSink(deliver, route=lambda attempt: [Destination()], spool=spool)
    sink.put(make(1), None)
    assert sink.flush(60)
    child = os.fork()
    if child == 0:
        sink.put(make(2), None)
        os._exit(0 if sink.flush(60) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert (tmp_path / f"{child}").read_text() == make(2).span_id
    sink.close()


def test_a_forked_child_reports_no_span_of_its_parent(sink):
    sink.put(make(1), None)
    assert sink.flush(60)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, sink.reports.text().encode())
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    (parent, *counts), (name, *of_child) = (
        text.split(";") for text in (sink.reports.text(), os.read(reading, 500).decode())
    )
    assert "delivered=1" in counts
    assert "delivered=0" in of_child
    assert name != parent
    os.close(reading)
    os.close(writing)


def test_a_full_spool_keeps_nothing_and_says_so(tmp_path, caplog):
    spool = Spool(tmp_path / "spool", max_bytes=10)
    with caplog.at_level(logging.ERROR, logger="lightning_spans"):
        assert spool.append(None, None, [make(1)]) == 0
    assert "full" in caplog.text


def test_the_spool_is_for_its_owner_only(spool):
    spool.append("http://x", "secret", [make(1)])
    assert spool.folder.stat().st_mode & 0o077 == 0
    assert all(path.stat().st_mode & 0o077 == 0 for path in spool.folder.iterdir())


def test_a_broken_spool_file_is_kept_aside_and_stops_nothing(spool):
    spool.append(None, None, [make(1)])
    (path,) = spool.folder.glob("*.spans")
    path.write_bytes(b"{half")
    spool.append(None, None, [make(2)])
    sent = []
    assert spool.replay(lambda url, key, spans: not sent.extend(spans)) == 1
    assert [span.span_id for span in sent] == [make(2).span_id]
    assert len(list(spool.folder.glob("*.broken"))) == 1
