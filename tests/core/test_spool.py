"""What can't be delivered waits on disk and is delivered after, in order, once: over restarts, kills and full disks."""

from __future__ import annotations

import errno
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from lightning_spans.record.delivery import outbox as spool_module
from lightning_spans.record.delivery.deliver import BatchRefusedError, BusyError, Delivery, Destination
from lightning_spans.record.delivery.http import HttpResponse
from lightning_spans.record.delivery.journal import Journal
from lightning_spans.record.delivery.otlp import PROTOBUF
from lightning_spans.record.delivery.outbox import STALE_S, Spool, line_of
from lightning_spans.record.delivery.sink import BatchSink
from lightning_spans.schema.attempts import Attempt
from lightning_spans.schema.spans import Span
from lightning_spans.store import open_store


def make(number: int, trace: int = 1, text: str = "") -> Span:
    return Span(
        operation="chat",
        name="m",
        trace_id=f"{trace:032x}",
        span_id=f"{number + 1:016x}",
        start_ns=number,
        end_ns=number,
        attributes={"text": text} if text else {},
    )


class Receivers:
    """Destinations by URL, each of which can be down."""

    def __init__(self) -> None:
        self.got: list[tuple[str | None, int]] = []
        self.down: set[str | None] = set()

    def __call__(self, destination, spans):
        if destination.url in self.down:
            raise ConnectionError("down")
        self.got += [(destination.url, span.start_ns) for span in spans]

    def at(self, url: str | None) -> list[int]:
        return [number for where, number in self.got if where == url]


@pytest.fixture
def receivers() -> Receivers:
    return Receivers()


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    return Spool(tmp_path / "spool")


@pytest.fixture
def sink(receivers: Receivers, spool: Spool) -> Iterator[BatchSink]:
    sink = BatchSink(receivers, route=lambda attempt: [Destination(attempt and attempt.endpoint)], spool=spool)
    yield sink
    sink.close()


def to(url: str) -> Attempt:
    return Attempt("r", "a", endpoint=url)


def try_again(sink: BatchSink) -> None:
    sink._lines.clear()


def test_a_destination_that_is_down_holds_up_no_other(sink: BatchSink, receivers: Receivers, spool: Spool) -> None:
    receivers.down = {"http://gone"}
    assert spool.append("http://gone", None, [make(0)]) == 1  # of a run whose server will never come back
    for number in range(1, 50):
        sink.put(make(number), to("http://here"))
    assert sink.flush(60)
    sink.put(make(50), to("http://gone"))
    sink.put(make(51), to("http://here"))
    assert sink.flush(60)
    assert receivers.at("http://here") == [*range(1, 50), 51]
    assert spool.pending() == 2


def test_what_comes_after_waits_behind_what_waits(sink: BatchSink, receivers: Receivers) -> None:
    receivers.down = {"http://x"}
    for number in range(300):
        if number == 200:
            receivers.down = set()
            try_again(sink)
        sink.put(make(number), to("http://x"))
        if number % 50 == 49:
            assert sink.flush(60)
    try_again(sink)
    sink.put(make(300), to("http://x"))
    assert sink.flush(60)
    assert receivers.at("http://x") == list(range(301))


def test_new_spans_are_kept_while_a_long_backlog_is_delivered(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_spans.record.delivery.sink.REPLAY_S", 0.0)
    got: list[int] = []
    recorded = iter(range(20, 70))

    def deliver(_: Destination, spans: Sequence[Span]) -> None:
        for number in islice(recorded, 5):  # the program records while the server takes a batch
            sink.put(make(number), to("http://x"))
        got.extend(span.start_ns for span in spans)

    sink = BatchSink(deliver, route=lambda _: [Destination("http://x")], spool=spool, queue_size=10)
    for number in range(20):
        spool.append("http://x", None, [make(number)])
    sink.put(make(next(recorded)), to("http://x"))
    assert sink.flush(60)
    sink.close()
    assert (sink.counts.dropped, spool.pending()) == (0, 0)
    assert got == list(range(70))


def test_a_full_spool_keeps_no_more_until_something_is_delivered(tmp_path: Path) -> None:
    size = len(Spool(tmp_path).body("http://x", None, [make(0)]))
    spool = Spool(tmp_path / "spool", max_bytes=2 * size)
    assert [spool.append("http://x", None, [make(number)]) for number in range(3)] == [1, 1, 0]
    assert _numbers(spool) == [0, 1]
    assert spool.append("http://x", None, [make(4)]) == 1


def test_a_batch_is_added_without_a_look_at_all_that_wait(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    spool.append("http://x", None, [make(0)])
    with monkeypatch.context() as blind:
        for name in ("listdir", "scandir"):
            blind.setattr(spool_module.os, name, lambda *_: pytest.fail("it lists the folder"))
        assert spool.append("http://x", None, [make(1)]) == 1
    assert _numbers(spool) == [0, 1]


def test_what_waits_for_the_own_store_is_delivered_before_what_waits_for_others(
    receivers: Receivers, spool: Spool
) -> None:
    for number, url in enumerate(("http://slow", "store:own", "store:other", "http://slow", "store:own")):
        spool.append(url, None, [make(number)])
    BatchSink(receivers, route=lambda _: [], spool=spool, own=Destination("store:own")).close()
    assert receivers.got == [("store:own", 1), ("store:own", 4), ("http://slow", 0), ("http://slow", 3)]
    assert spool.pending() == 1  # of the other store


def test_the_key_of_the_own_server_is_not_written_and_the_next_process_sends_its_own(
    receivers: Receivers, spool: Spool, tmp_path: Path
) -> None:
    server = Destination("http://server/v1/traces", "live-secret", own=True)
    receivers.down.add(server.url)
    journal = Journal(Spool(tmp_path / "journal"))
    journal.write([server], make(0))
    sink = BatchSink(receivers, route=lambda _: [server], spool=spool, own=server)
    sink.put(make(1), None)
    sink.close()
    for folder in (spool.folder, tmp_path / "journal"):
        written = b"".join(path.read_bytes() for path in folder.iterdir())
        assert (b"http://server" in written, b"live-secret" in written) == (True, False)
    journal.close()
    sent: list[Destination] = []

    def deliver(destination: Destination, _: object) -> None:
        sent.append(destination)

    for other in (Destination("http://elsewhere/v1/traces", "new", own=True), replace(server, key=None)):
        BatchSink(deliver, route=lambda _: [], spool=spool, own=other).close()
        assert (sent, spool.pending()) == ([], 1)  # no other server gets it, and none without a key
    BatchSink(deliver, route=lambda _: [], spool=spool, own=replace(server, key="new")).close()
    assert ([to.key for to in sent], spool.pending()) == (["new"], 0)


def test_what_another_process_left_for_its_own_server_delays_no_attempt_there(
    receivers: Receivers, spool: Spool, sink: BatchSink
) -> None:
    left = Destination("http://server", "live", own=True)
    spool.append(left.url, left.written_key, [make(0)])
    for number in (1, 2):
        sink.put(make(number), to("http://server"))
        assert sink.flush(60)
    assert receivers.got == [("http://server", 1), ("http://server", 2)]
    assert spool.pending() == 1


def test_the_first_line_is_delivered_before_all_others(spool: Spool) -> None:
    for number, url in enumerate(("http://a", "http://b", "http://a", "http://b")):
        spool.append(url, None, [make(number)])
    got: list[int] = []
    spool.replay(lambda _, __, spans: not got.extend(span.start_ns for span in spans), first=line_of("http://b", None))
    assert got == [1, 3, 0, 2]


ODD = {"text": "report-\udcff.txt", "number": 2**70, "inner": {"\udcff": [-(2**70)]}}


def test_text_and_numbers_that_plain_json_has_not_come_back_from_the_spool(spool: Spool) -> None:
    odd = replace(make(1), name="report-\udcff.txt", attributes=ODD)
    batch = [make(0), odd, make(2, text="fine")]
    assert spool.append("http://x", "key", batch) == 3
    got: list[object] = []
    assert spool.replay(lambda url, key, spans: not got.append((url, key, spans))) == 1
    assert got == [("http://x", "key", batch)]


def test_what_is_no_json_is_spooled_as_its_type_and_costs_no_other_span(
    spool: Spool, caplog: pytest.LogCaptureFixture
) -> None:
    circle: list[Any] = []
    circle.append(circle)
    odd = replace(make(1), attributes={"where": {"is": Path("hunter2")}, "circle": circle, **ODD})
    assert spool.append(None, None, [make(0), odd, make(2)]) == 3
    got: list[Span] = []
    assert spool.replay(lambda _, __, spans: not got.extend(spans)) == 1
    assert got == [make(0), replace(odd, attributes={"where": "<dict>", "circle": "<list>", **ODD}), make(2)]
    assert "can't be spooled whole" in caplog.text


def test_odd_text_costs_none_of_the_spans_that_wait_with_it(sink: BatchSink, receivers: Receivers) -> None:
    receivers.down = {None, "http://x"}
    for attempt in (None, to("http://x")):
        for number in range(50):
            sink.put(replace(make(number), attributes=ODD if number == 7 else {}), attempt)
    assert sink.flush(60)
    assert (sink.counts.spooled, sink.counts.dropped) == (100, 0)
    receivers.down = set()
    try_again(sink)
    sink.put(make(50), None)
    assert sink.flush(60)
    try_again(sink)
    assert sink.flush(60)
    assert sorted(receivers.at("http://x")) == list(range(50))
    assert sorted(receivers.at(None)) == list(range(51))


HOLD = """
import sys, time
from pathlib import Path
from lightning_spans.record.delivery.outbox import Spool

spool = Spool(Path(sys.argv[1]))

def send(url, key, spans):
    print("delivering", flush=True)
    time.sleep(60)
    return True

spool.replay(send)
"""


def test_one_process_delivers_at_a_time_and_another_goes_on_when_it_dies(
    sink: BatchSink, receivers: Receivers, spool: Spool
) -> None:
    spool.append("http://x", None, [make(0)])
    command = [sys.executable, "-c", HOLD, str(spool.folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "delivering\n"
        for number in range(1, 5):
            sink.put(make(number), to("http://x"))
        assert sink.flush(60)
        assert receivers.got == []  # behind what the other delivers
        other.send_signal(signal.SIGKILL)
    sink.put(make(5), to("http://x"))
    assert sink.flush(60)
    until = time.monotonic() + 60
    while len(receivers.got) < 6 and time.monotonic() < until:
        time.sleep(0.05)
    assert receivers.at("http://x") == list(range(6))


def test_a_clock_that_is_set_back_does_not_change_the_order(
    spool: Spool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool.append(None, None, [make(0)])
    monkeypatch.setattr(spool_module.time, "time_ns", lambda: 5)
    spool.append(None, None, [make(1)])
    Spool(spool.folder).append(None, None, [make(2)])  # the next process
    got: list[int] = []
    assert spool.replay(lambda url, key, spans: not got.extend(span.start_ns for span in spans)) == 3
    assert got == [0, 1, 2]


def test_a_full_disk_keeps_spans_in_memory_until_there_is_room(
    sink: BatchSink,
    receivers: Receivers,
    spool: Spool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(path: Path, body: bytes) -> None:
        path.write_bytes(body[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    receivers.down = {"http://x"}
    with monkeypatch.context() as full:
        full.setattr(spool_module, "_write", refuse)
        for number in range(100):
            sink.put(make(number), to("http://x"))
        assert not sink.flush(1.0)
        assert "No space left" in caplog.text
        assert list(spool.folder.glob("*.half")) == []  # nothing half is left behind on a full disk
    assert sink.flush(60)  # there is room again
    assert (sink.counts.spooled, sink.counts.dropped) == (100, 0)
    receivers.down = set()
    try_again(sink)
    sink.put(make(100), to("http://x"))
    assert sink.flush(60)
    assert receivers.at("http://x") == list(range(101))


def test_a_file_system_without_locks_is_told_and_costs_nothing(
    receivers: Receivers, spool: Spool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    spool.append("http://x", None, [make(0)])
    with monkeypatch.context() as network:
        network.setattr("fcntl.lockf", refuse)
        sink = BatchSink(receivers, route=lambda _: [Destination("http://x")], spool=spool)
        sink.put(make(1), None)
        sink.close()
    assert "No locks available: its file system has no locks. Set LIGHTNING_SPOOL" in caplog.text
    BatchSink(receivers, route=lambda _: [], spool=spool).close()
    assert (receivers.at("http://x"), spool.pending()) == ([0, 1], 0)


def test_a_full_disk_at_the_end_is_told(
    receivers: Receivers, spool: Spool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sink = BatchSink(receivers, route=lambda _: [Destination("http://x")], spool=spool)
    receivers.down = {"http://x"}

    def refuse(path: Path, body: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(spool_module, "_write", refuse)
    sink.put(make(0), None)
    sink.close()
    assert (sink.counts.dropped, "1 dropped" in caplog.text) == (1, True)


def test_a_destination_that_hangs_at_the_end_costs_no_span(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_spans.record.delivery.sink.CLOSE_S", 0.3)
    sink = BatchSink(lambda *_: time.sleep(3), route=lambda _: [Destination("http://x")], spool=spool)
    sink.put(make(0), None)
    time.sleep(0.3)  # it hangs with the first
    sink.put(make(1), None)
    sink.close()
    assert sink.counts.spooled == 2
    assert sorted(_numbers(spool)) == [0, 1]


def _numbers(spool: Spool) -> list[int]:
    got: list[int] = []
    spool.replay(lambda url, key, spans: not got.extend(span.start_ns for span in spans))
    return got


def test_half_a_batch_of_a_process_that_died_is_removed_when_old(spool: Spool) -> None:
    spool.append(None, None, [make(0)])
    for name, age in (("1-a-b.half", STALE_S + 1), ("2-a-b.half", 0)):
        (spool.folder / name).write_text("{")
        os.utime(spool.folder / name, (time.time() - age,) * 2)
    assert spool.pending() == 1
    assert [path.name for path in spool.folder.glob("*.half")] == ["2-a-b.half"]


class Answers:
    """A server that takes bodies up to a size, and says what it will never take."""

    def __init__(self, answer: Callable[[bytes], HttpResponse]) -> None:
        self.answer = answer
        self.sizes: list[int] = []

    def __call__(self, url: str, content: bytes, headers: dict[str, str]) -> HttpResponse:
        self.sizes.append(len(content))
        return self.answer(content)

    def close(self) -> None:
        pass


def _delivery(answer: Callable[[bytes], HttpResponse]) -> tuple[Delivery, Answers]:
    delivery, answers = Delivery(lambda: pytest.fail("no own store is needed")), Answers(answer)
    delivery._send = answers
    return delivery, answers


def test_a_batch_that_is_too_large_goes_in_parts_and_one_span_costs_no_other() -> None:
    taken, too_large = HttpResponse(200, {}, b""), HttpResponse(413, {}, b"too large")
    delivery, answers = _delivery(lambda body: taken if len(body) < 1000 else too_large)
    spans = [make(number, text="x" * (2000 if number == 5 else 100)) for number in range(8)]
    assert delivery(Destination("http://x/v1/traces"), spans) == 1
    assert sum(size < 1000 for size in answers.sizes) >= 2
    with pytest.raises(BatchRefusedError, match="413"):
        delivery(Destination("http://x/v1/traces"), [spans[5]])


def test_what_the_server_takes_in_part_is_counted(receivers: Receivers, spool: Spool) -> None:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

    partly = ExportTraceServiceResponse()
    partly.partial_success.rejected_spans = 3
    body = partly.SerializeToString()
    delivery, _ = _delivery(lambda _: HttpResponse(200, {"content-type": PROTOBUF}, body))
    sink = BatchSink(delivery, route=lambda _: [Destination("http://x/v1/traces")], spool=spool)
    for number in range(10):
        sink.put(make(number), None)
    assert sink.flush(60)
    sink.close()
    assert (sink.counts.delivered, sink.counts.refused) == (7, 3)


def test_a_busy_server_is_given_the_time_it_asks_for() -> None:
    delivery, _ = _delivery(lambda _: HttpResponse(503, {"retry-after": "7"}, b""))
    with pytest.raises(BusyError) as busy:
        delivery(Destination("http://x/v1/traces"), [make(0)])
    assert busy.value.retry_after_s == 7


SENDER = """
import sys, time
from pathlib import Path
from lightning_spans.record.delivery import sink as sinks
from lightning_spans.record.delivery.deliver import Delivery, Destination
from lightning_spans.record.delivery.outbox import Spool
from lightning_spans.record.delivery.sink import BatchSink
from lightning_spans.schema.spans import Span

url, folder, trace, first, key = sys.argv[1:6]
sinks.RETRY_S = (0.05,)
sink = BatchSink(Delivery(lambda: None), route=lambda _: [Destination(url, key)], spool=Spool(Path(folder)))
number = int(first)
while True:
    ids = {"trace_id": trace, "span_id": f"{number + 1:016x}"}
    sink.put(Span(operation="chat", name="m", start_ns=number, end_ns=number, **ids), None)
    number += 1
    if number % 20 == 0:
        sink.flush(60)
        print(number, sink.counts.dropped, flush=True)  # these are delivered or on disk
        time.sleep(0.01)
"""


def test_two_processes_killed_and_restarted_while_the_server_comes_and_goes(tmp_path: Path) -> None:
    pytest.importorskip("lightning_trainer")
    from lightning_trainer.gateway.app import create_app
    from lightning_trainer.gateway.auth.keys import Keys
    from lightning_trainer.gateway.http.serving import ServerThread

    keys, path = Keys.fresh(), tmp_path / "s.db"
    key, traces = keys.issue("admin"), [f"{1:032x}", f"{2:032x}"]

    def serve(port: int = 0):
        store = open_store(str(path))
        thread = ServerThread(create_app(store, keys=keys), port=port)
        return thread, thread.start(), store

    server, url, store = serve()
    port = int(url.rsplit(":", 1)[1])
    safe = dict.fromkeys(traces, 0)

    def send(trace: str) -> subprocess.Popen[str]:
        given = [f"{url}/v1/traces", str(tmp_path / "spool"), trace, str(safe[trace]), key]
        return subprocess.Popen([sys.executable, "-c", SENDER, *given], stdout=subprocess.PIPE, text=True)

    for round_ in range(2):
        senders = [send(trace) for trace in traces]
        for count in range(12):
            for sender, trace in zip(senders, traces, strict=True):
                number, dropped = (int(word) for word in sender.stdout.readline().split())
                assert dropped == 0
                safe[trace] = number
            if count == 4:
                server.stop()
                store.close()
            if count == 8 and round_ == 1:
                server, url, store = serve(port)
        for sender in senders:
            sender.kill()
            for line in sender.communicate()[0].splitlines():
                trace = traces[senders.index(sender)]
                safe[trace] = max(safe[trace], int(line.split()[0]))
        if round_ != 1:
            server, url, store = serve(port)
    last = Spool(tmp_path / "spool")
    deliver = Delivery(lambda: pytest.fail("no own store is needed"))
    last.replay(lambda url, key, spans: deliver(Destination(url, key), spans) == 0)
    assert last.pending() == 0
    server.stop()
    store.close()
    with sqlite3.connect(path) as kept:
        for trace in traces:
            found = [n for (n,) in kept.execute("SELECT start_ns FROM spans WHERE trace_id = ? ORDER BY seq", [trace])]
            assert found == sorted(found)
            assert set(range(safe[trace])) <= set(found)
            assert len(found) == len(set(found))


def test_a_half_written_batch_of_another_process_holds_up_nothing(spool: Spool) -> None:
    spool.folder.mkdir(parents=True, exist_ok=True)
    (spool.folder / f"1-{line_of('http://a', 'k')}-b.half").touch()
    assert not spool.waits("http://a", "k")


def test_a_spool_that_another_process_has_emptied_is_not_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_spans.record.delivery.outbox._RECOUNT_S", 0.0)
    one, other = (Spool(tmp_path / "shared", max_bytes=2000) for _ in range(2))
    while one.append("http://a", "k", [make(1)]):
        pass
    assert other.replay(lambda *_: True) > 0
    assert one.append("http://a", "k", [make(1)]) == 1
