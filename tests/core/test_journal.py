"""A span that has ended is on disk before the call returns: its process may end at once, in whatever way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_spans import attach, open_store
from lightning_spans.record.delivery import journal as journals
from lightning_spans.record.delivery.deliver import Destination
from lightning_spans.record.delivery.outbox import JOURNAL, Spool
from lightning_spans.record.delivery.sink import BatchSink
from lightning_spans.schema.spans import Span

_ENDS = {
    "os._exit": "os._exit(0)",
    "SIGKILL": "os.kill(os.getpid(), signal.SIGKILL)",
    "multiprocessing": "os._exit(0)",  # in a spawned process, as those of `Pool` and `Process` are
    "forked": "os._exit(0)",
}
_PROGRAM = """
import os, signal, sys, time, multiprocessing
from lightning_spans import attach, hookimpl, hooks, workflow

class Toy:
    @hookimpl
    def lightning_attach(self, framework, recorder):
        return lambda: None

hooks.register(Toy(), "toy")

def work():
    attach("toy")
    for number in range(5):
        with workflow(f"step {number}"):
            pass
    HOW

if __name__ == "__main__":
    if sys.argv[1] == "multiprocessing":
        process = multiprocessing.get_context("spawn").Process(target=work)
        process.start()
        process.join()
    elif sys.argv[1] == "forked":
        attach("toy")
        if os.fork() == 0:
            work()
        os.wait()
    else:
        work()
"""


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    return Spool(tmp_path / "lightning-spool")


@pytest.mark.parametrize("how", list(_ENDS))
def test_no_span_is_lost_however_its_process_ends(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "program.py").write_text(_PROGRAM.replace("HOW", _ENDS[how]))
    env = {name: value for name, value in os.environ.items() if not name.startswith("LIGHTNING_")}
    command = [sys.executable, "program.py", how]
    child = subprocess.run(command, cwd=tmp_path, env=env, check=False)
    assert child.returncode == (-signal.SIGKILL if how == "SIGKILL" else 0)
    store = str(tmp_path / "lightning.db")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LIGHTNING_SPOOL", raising=False)
    with attach("openai", store=store) as attachment:
        assert attachment.flush(60)
    assert sorted(span.name for span in open_store(store).spans()) == [f"step {number}" for number in range(5)]
    assert not Spool(tmp_path / "lightning-spool").journals()


def _span(number: int) -> Span:
    ids = {"trace_id": f"{1:032x}", "span_id": f"{number + 1:016x}"}
    return Span(operation="chat", name=f"{number}", start_ns=1, end_ns=2, **ids)


def test_a_span_is_in_the_journal_until_it_is_delivered(spool: Spool) -> None:
    there: list[bytes] = []

    def look(_: Destination, __: object) -> None:
        there.extend(path.read_bytes() for path in spool.folder.glob(f"*{JOURNAL}"))

    sink = BatchSink(look, route=lambda _: [Destination("http://x", "k")], spool=spool)
    sink.put(_span(7), None)
    assert sink.flush(60)
    (line,) = there
    assert b'"http://x"' in line
    assert line.endswith(b"\n")
    assert [path.stat().st_size for path in spool.folder.glob(f"*{JOURNAL}")] == [0]
    sink.close()
    assert not spool.folder.exists()


def test_a_long_journal_is_replaced_and_nothing_left_behind(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journals, "LONG", 100)
    got: list[str] = []
    sink = BatchSink(
        lambda _, spans: got.extend(span.name for span in spans), route=lambda _: [Destination()], spool=spool
    )
    for number in range(2_000):
        sink.put(_span(number), None)
    assert sink.flush(60)
    assert got == [str(number) for number in range(2_000)]
    assert sum(path.stat().st_size for path in spool.folder.iterdir()) <= 200
    sink.close()


def test_what_a_killed_process_had_half_written_costs_no_other_span(
    spool: Spool, caplog: pytest.LogCaptureFixture
) -> None:
    spool.folder.mkdir()
    whole = spool.body("http://x", "k", [_span(1)]) + b"\n"
    (spool.folder / f"one{JOURNAL}").write_bytes(whole + whole[:40])
    (spool.folder / f"two{JOURNAL}").write_bytes(whole[:40] + b"\n" + whole)
    got: list[tuple[str | None, int]] = []
    assert spool.replay(lambda url, _, spans: not got.append((url, len(spans)))) == 2
    assert got == [("http://x", 1)] * 2
    assert [path.name for path in spool.folder.glob("*.broken")] == ["two.broken"]
    assert "1 spans of" in caplog.text


def test_a_folder_that_can_not_be_written_costs_no_span(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("no folder")
    got: list[str] = []
    sink = BatchSink(
        lambda _, spans: got.extend(span.name for span in spans),
        route=lambda _: [Destination()],
        spool=Spool(tmp_path / "file" / "spool"),
    )
    for number in range(3):
        sink.put(_span(number), None)
    assert sink.flush(60)
    assert got == ["0", "1", "2"]
    assert caplog.text.count("no journal in") == 1
    sink.close()
