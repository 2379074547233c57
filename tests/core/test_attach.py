from __future__ import annotations

import gc
import os
import socket
import sqlite3
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
from opentelemetry.sdk.trace import SpanProcessor

import lightning_spans
from lightning_spans import agent, attach, hookimpl, hooks, open_store, use_attempt
from lightning_spans.errors import AttachError, ConfigError
from lightning_spans.record.attach import attached_frameworks
from lightning_spans.record.context import current_agent
from lightning_spans.record.delivery.deliver import Delivery
from lightning_spans.record.delivery.sink import BatchSink
from lightning_spans.record.pipeline import live_recorder
from lightning_spans.record.tracing.listeners import Listeners, Naming
from lightning_spans.record.tracing.tracers import Ids
from lightning_spans.schema import spans as names
from lightning_spans.schema.attempts import Attempt


class Toy:
    """A framework with one function, which a plugin wraps."""

    def __init__(self):
        self.call = self.original = lambda text: text.upper()

    @hookimpl
    def lightning_attach(self, framework, recorder):
        if framework != "toy":
            return None

        def call(text):
            span = recorder.start(names.CHAT, "toy")
            answer = self.original(text)
            span.end()
            return answer

        self.call = call

        def undo():
            self.call = self.original

        return undo


@pytest.fixture
def toy(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    toy = Toy()
    hooks.register(toy, "toy")
    yield toy
    hooks.unregister("toy")


def stored(path="lightning.db"):
    store = open_store(str(path))
    try:
        return store.spans()
    finally:
        store.close()


def test_without_options_or_runner_spans_go_to_a_database_in_this_folder(toy, tmp_path):
    with attach("toy"):
        assert toy.call("hi") == "HI"
    (span,) = stored(tmp_path / "lightning.db")
    assert (span.operation, span.name) == ("chat", "toy")


@pytest.mark.parametrize(("named", "file"), [(None, "lightning.db"), ("a/x.db", "a/x.db"), ("sqlite:///x.db", "x.db")])
def test_a_program_that_changes_its_folder_keeps_its_store(toy, tmp_path, monkeypatch, caplog, named, file):
    for folder in ("a", "b", "c"):
        (tmp_path / folder).mkdir()
    with attach("toy", store=named) as attachment:
        for folder in ("b", "c"):
            monkeypatch.chdir(tmp_path / folder)
            toy.call("hi")
            assert attachment.flush()
    assert len(stored(tmp_path / file)) == 2
    assert list((tmp_path / "b").iterdir()) == list((tmp_path / "c").iterdir()) == []
    assert caplog.records == []


def test_attaching_in_another_folder_agrees_where_no_store_is_named(toy, tmp_path, monkeypatch):
    with attach("toy") as attachment:
        (tmp_path / "task").mkdir()
        monkeypatch.chdir(tmp_path / "task")
        assert attach("toy") is attachment
        with pytest.raises(AttachError, match=r"task.lightning\.db"):
            attach("toy", store="lightning.db")


def test_detach_stops_recording_and_restores_what_was_changed(toy):
    attachment = attach("toy")
    assert toy.call is not toy.original
    attachment.detach()
    attachment.detach()
    assert toy.call is toy.original
    assert live_recorder() is None
    assert not attachment.live


def test_attaching_twice_is_attaching_once(toy):
    first = attach("toy")
    assert attach("toy") is first
    toy.call("hi")
    first.detach()
    assert toy.call is toy.original
    assert len(stored()) == 1


def test_other_options_while_attached_are_refused(toy):
    with attach("toy"), pytest.raises(AttachError, match="Detach it first"):
        attach("toy", tracer="embedded")


def test_an_unknown_framework_is_refused_and_leaves_nothing_live(toy):
    with pytest.raises(AttachError, match="lightning-nothing"):
        attach("nothing")
    with pytest.raises(ConfigError, match="tracer"):
        attach("toy", tracer="paper")
    assert attached_frameworks() == []
    assert live_recorder() is None


def test_a_plugin_whose_framework_is_missing_says_what_to_install(toy, monkeypatch):
    class Lonely:
        @hookimpl
        def lightning_attach(self, framework, recorder):
            if framework == "lonely":
                raise ModuleNotFoundError("No module named 'lonely'")

    hooks.register(Lonely(), "lonely")
    try:
        with pytest.raises(AttachError, match="Is lonely itself installed"):
            attach("lonely")
    finally:
        hooks.unregister("lonely")


def test_a_store_that_is_gone_changes_nothing_for_the_agent(toy, tmp_path, monkeypatch):
    monkeypatch.setenv("LIGHTNING_SPOOL", str(tmp_path / "spool"))
    (tmp_path / "not-a-folder").write_text("")
    with attach("toy", store=str(tmp_path / "not-a-folder" / "x.db")) as attachment:
        assert toy.call("hi") == "HI"
        assert attachment.flush()
    assert len(list((tmp_path / "spool").glob("*.spans"))) == 1


@pytest.mark.parametrize("replaced", [False, True], ids=["deleted", "replaced"])
def test_a_store_that_is_deleted_is_begun_anew_and_that_is_said(toy, tmp_path, caplog, replaced):
    with attach("toy") as attachment:
        toy.call("lost")
        assert attachment.flush(60)
        for file in tmp_path.glob("lightning.db*"):
            file.unlink()
        if replaced:
            assert stored() == []
        with agent("writer"):
            for _ in range(3):
                toy.call("kept")
                assert attachment.flush(60)
    assert [s.agent for s in stored()] == ["writer"] * 4
    assert caplog.text.count("deleted or replaced") == 1
    assert not list(tmp_path.glob("lightning-spool/*.spans"))


@pytest.fixture
def blocked(monkeypatch):
    """A destination that takes nothing, for as long as the test lasts."""
    gate = threading.Event()
    monkeypatch.setattr("lightning_spans.record.delivery.deliver.Delivery.__call__", lambda *_: gate.wait(60))
    monkeypatch.setattr("lightning_spans.record.delivery.sink.DETACH_S", 0.05)
    yield
    gate.set()


def returns(work):
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(30)
    return not thread.is_alive()


def test_detach_waits_for_no_sink_that_blocks_and_says_what_was_not_sent(toy, tmp_path, blocked, caplog):
    attachment = attach("toy")
    assert toy.call("hi") == "HI"
    assert returns(attachment.detach)
    assert toy.call is toy.original
    assert "of 1 spans 0 were delivered; 1 were spooled" in caplog.text
    assert len(list((tmp_path / "lightning-spool").glob("*.spans"))) == 1


def test_detach_waits_for_no_span_processor_that_blocks(toy, monkeypatch):
    monkeypatch.setattr("lightning_spans.record.delivery.sink.DETACH_S", 0.05)
    gate = threading.Event()

    class Blocked(SpanProcessor):
        def shutdown(self):
            gate.wait(60)

    attachment = attach("toy", span_processors=[Blocked()])
    try:
        assert returns(attachment.detach)
        assert toy.call is toy.original
    finally:
        gate.set()


def test_a_server_that_never_answers_keeps_no_span_from_the_own_store(toy, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(60)
        attachment = attach("toy", otlp=f"http://127.0.0.1:{silent.getsockname()[1]}/v1/traces")
        toy.call("a")
        line, _ = silent.accept()  # what delivers waits there from now on
        toy.call("b")
        monkeypatch.setattr("lightning_spans.record.delivery.sink.DETACH_S", 0.05)
        with line:
            attachment.detach()
            assert len(stored()) == 2


def test_what_is_spooled_for_one_store_is_delivered_to_no_other(toy, tmp_path, monkeypatch):
    monkeypatch.setattr("lightning_spans.store.sql.sqlite._PRAGMAS", ("PRAGMA busy_timeout=20",))

    def waiting():
        return len(list((tmp_path / "lightning-spool").glob("*.spans")))

    with closing(sqlite3.connect(tmp_path / "a.db", isolation_level=None)) as other:
        with attach("toy", store="a.db") as attachment:
            toy.call("a")
            assert attachment.flush(60)
            other.execute("BEGIN EXCLUSIVE")
            toy.call("a")
        other.rollback()
    with attach("toy", store="b.db"):
        toy.call("b")
    assert (len(stored("a.db")), len(stored("b.db")), waiting()) == (1, 1, 1)
    with attach("toy", store=str(tmp_path / "a.db")):
        pass
    assert (len(stored("a.db")), len(stored("b.db")), waiting()) == (2, 1, 0)


def test_an_undo_that_fails_is_logged_and_all_else_is_undone(toy, caplog):
    class Clumsy:
        @hookimpl
        def lightning_attach(self, framework, recorder):
            return (lambda: 1 / 0) if framework == "clumsy" else None

    hooks.register(Clumsy(), "clumsy")
    try:
        attach("clumsy").detach()
    finally:
        hooks.unregister("clumsy")
    assert "some changes of attaching clumsy could not be undone" in caplog.text
    assert live_recorder() is None


def test_plain_code_names_its_agents(toy):
    with attach("toy"), agent("writer") as outer:
        toy.call("a")
        with agent("checker"):
            toy.call("b")
        toy.call("c")
    spans = stored()
    assert [s.agent for s in spans if s.operation == "chat"] == ["writer", "checker", "writer"]
    root, *_ = [s for s in spans if s.operation == "invoke_agent"]
    assert (root.span_id, root.parent_id) == (outer.span_id, None)
    assert len({s.trace_id for s in spans}) == 1


def test_an_agent_is_named_also_when_nothing_is_attached():
    with agent("writer") as span:
        assert span is None
        assert current_agent() == "writer"
    assert current_agent() is None


def test_an_error_in_an_agents_block_reaches_the_user_and_its_span(toy):
    with attach("toy"), pytest.raises(ZeroDivisionError), agent("writer"):
        _ = 1 / 0
    assert stored()[0].status == "error"


def test_the_agent_is_known_in_threads_and_executors(toy):
    with attach("toy"), use_attempt(Attempt("r", "a")), agent("writer"):
        thread = threading.Thread(target=toy.call, args=("a",))
        thread.start()
        thread.join()
        with ThreadPoolExecutor(1) as pool:
            pool.submit(toy.call, "b").result()
    chats = [s for s in stored() if s.operation == "chat"]
    assert [(s.agent, s.attempt_id) for s in chats] == [("writer", "a")] * 2


class Calling(threading.Thread):
    def __init__(self, toy):
        super().__init__()
        self.toy = toy

    def run(self):
        self.toy.call("a")
        self.own = "run" not in vars(self)


class CallingMore(Calling):
    def run(self):
        super().run()
        self.toy.call("b")


@pytest.mark.parametrize("kind", [Calling, CallingMore])
def test_the_agent_is_known_in_threads_with_a_run_of_their_own(toy, kind):
    with attach("toy"):
        with use_attempt(Attempt("r", "a")), agent("writer"):
            thread = kind(toy)
            thread.start()
        thread.join()
    chats = [s for s in stored() if s.operation == "chat"]
    assert [(s.agent, s.attempt_id) for s in chats] == [("writer", "a")] * len(chats)
    assert len(chats) == (2 if kind is CallingMore else 1)
    assert thread.own


def test_detach_leaves_threads_alone(toy):
    start = threading.Thread.start
    with attach("toy"):
        assert threading.Thread.start is not start
    assert threading.Thread.start is start


def test_rewards_given_while_attached_without_a_runner_are_stored(toy):
    with attach("toy"), use_attempt(Attempt("r", "a")):
        lightning_spans.emit_reward(0.5, agent="writer")
    store = open_store("lightning.db")
    assert [(r.value, r.agent, r.attempt_id) for r in store.rewards()] == [(0.5, "writer", "a")]
    store.close()


def test_a_reward_after_the_store_was_deleted_is_stored(toy, tmp_path):
    with attach("toy") as attachment, use_attempt(Attempt("r", "a")):
        toy.call("lost")
        assert attachment.flush(60)
        for file in tmp_path.glob("lightning.db*"):
            file.unlink()
        lightning_spans.emit_reward(0.5)
    store = open_store("lightning.db")
    assert [r.value for r in store.rewards()] == [0.5]
    store.close()


def test_the_function_is_not_hidden_by_its_module():
    code = "import lightning_spans.record.attach, lightning_spans; assert callable(lightning_spans.attach)"
    subprocess.run([sys.executable, "-c", code], check=True)


TOY = """
import multiprocessing, os, signal, sys, threading, time
from lightning_spans import agent, attach, hookimpl, open_store, hooks
from lightning_spans.record import recorder
from lightning_spans.record.delivery import sink

sink.CLOSE_S = sink.DETACH_S = 120.0  # on a machine with other things to do

class Toy:
    @hookimpl
    def lightning_attach(self, framework, recorder):
        return lambda: None

hooks.register(Toy(), "toy")
"""
FORKED = """
attachment = attach("toy", store="own.db", tracer="otel")
{before}
child = os.fork()
if child == 0:
    with agent("child"):
        pass
    os._exit(0 if attachment.flush(60) else 3)
end = time.monotonic() + 60
while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
    if time.monotonic() > end:  # hooks for forked children run before `fork` returns: no alarm of its own would be set
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        sys.exit("the child hangs")
    time.sleep(0.01)
attachment.detach()
if code := os.waitstatus_to_exitcode(ended[1]):
    sys.exit(f"the child ended with {{code}}")
store = open_store("own.db")
assert [span.agent for span in store.spans()][-1] == "child", store.spans()
store.close()
"""


def run_toy(program, folder, environment=None):
    """Run a program, in a process of its own, that attaches to a framework that does nothing; return what it prints."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("LIGHTNING_")}
    environ = {**own, "LIGHTNING_SPOOL": str(folder / "spool"), **(environment or {})}
    command = [sys.executable, "-c", TOY + program]
    ran = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=240, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


BEFORE = {
    "at once": "",
    "after executors were imported": "import concurrent.futures.thread",
    "after a span was delivered": "with agent('parent'): pass\nassert attachment.flush(60)",
    "while a thread finishes a span": "recorder._finishing.acquire()",
}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("before", BEFORE)
def test_an_attached_program_can_fork(before, tmp_path):
    run_toy(FORKED.format(before=BEFORE[before]), tmp_path)


WORKERS = """
def work(number):
    with agent(f"worker {{number}}"):
        pass

def attach_and_work(number):
    attach("toy", store="own.db")
    work(number)

forking = multiprocessing.get_context("fork")
{program}
store = open_store("own.db")
assert {{span.agent for span in store.spans()}} >= {{f"worker {{number}}" for number in range(4)}}, store.spans()
store.close()
"""
PROCESSES = """
workers = [forking.Process(target=work, args=(number,)) for number in range(4)]
for worker in workers:
    worker.start()
for worker in workers:
    worker.join()
"""
POOL = """
with forking.Pool(2) as pool:
    pool.map(work, range(4), 1)
    pool.close()
    pool.join()
"""
ATTACHED = "attachment = attach('toy', store='own.db')"
DELIVERED = "with agent('parent'): pass\nassert attachment.flush(60)"
WORKING = {
    "processes": ATTACHED + PROCESSES,
    "processes after a span was delivered": f"{ATTACHED}\n{DELIVERED}{PROCESSES}",
    "processes that attach": PROCESSES.replace("work,", "attach_and_work,"),
    "a pool": ATTACHED + POOL,
    "a pool that attaches": POOL.replace("work,", "attach_and_work,"),
}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("working", WORKING)
def test_workers_of_multiprocessing_deliver_at_their_end(working, tmp_path):
    run_toy(WORKERS.format(program=WORKING[working]), tmp_path)


@pytest.mark.parametrize("tracer", ["otel", "embedded"])
def test_a_detached_attachment_keeps_nothing_alive(tracer, tmp_path):
    """A program may attach for each attempt, and fork afterwards: what was detached must not begin again there."""
    pytest.importorskip("lightning_openai")
    gc.freeze()  # what other tests left is not looked through

    def living() -> int:
        gc.collect()
        kinds = (BatchSink, Delivery, Listeners, Naming, Ids)
        return sum(isinstance(found, kinds) for found in gc.get_objects())

    def once() -> None:
        with attach("openai", store=str(tmp_path / "own.db"), tracer=tracer), agent("writer"):
            pass

    once()
    before = living()
    for _ in range(3):
        once()
    after = living()
    gc.unfreeze()
    assert after == before


@pytest.mark.parametrize(
    ("environment", "loaded"),
    [
        ({}, True),
        ({"LIGHTNING_WORKER": "1"}, False),
        ({"LIGHTNING_STORE": "http://127.0.0.1:9"}, False),
        (Attempt("r", "a", endpoint="http://127.0.0.1:9").environment(), False),
    ],
    ids=["alone", "in a worker", "to a server", "in an attempt"],
)
def test_what_writes_the_own_store_is_imported_before_the_first_run_where_it_will_be_used(
    environment, loaded, tmp_path
):
    printed = run_toy("with attach('toy'):\n    print('sqlalchemy' in sys.modules)", tmp_path, environment)
    assert printed.split() == [str(loaded)]
