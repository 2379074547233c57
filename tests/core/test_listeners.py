from __future__ import annotations

import logging
import os
import threading

import pytest
from opentelemetry.context import Context, get_value

from lightning_spans import hookimpl, hooks
from lightning_spans.record.recorder import SpanRecorder
from lightning_spans.record.tracing.listeners import Listeners, Naming
from lightning_spans.record.tracing.tracers import TRACERS, make_tracer
from lightning_spans.schema import spans as names
from support.fake_sink import ListSink

PATIENCE_S = 60.0


class Listener:
    """Keeps what it is told; with `blocked`, waits until `free` is set."""

    def __init__(self, *, blocked: bool = False) -> None:
        self.spans = []
        self.entered = threading.Event()
        self.free = threading.Event()
        if not blocked:
            self.free.set()

    @hookimpl
    def lightning_span_ended(self, span):
        self.entered.set()
        assert self.free.wait(PATIENCE_S)
        self.spans.append(span)


@pytest.fixture
def registered():
    known = []

    def register(plugin):
        known.append(f"listener-{len(known)}")
        hooks.register(plugin, known[-1])
        return plugin

    yield register
    for name in known:
        hooks.unregister(name)


@pytest.fixture
def listeners():
    made = Listeners(queue_size=3)
    yield made
    made.close()


@pytest.fixture
def recorder(listeners):
    return SpanRecorder(make_tracer("embedded", ListSink()), on_end=listeners.tell)


def end(recorder, *called):
    for name in called:
        recorder.start(names.CHAT, name, agent="writer").end()


def test_the_agent_goes_on_while_a_listener_hangs(registered, listeners, recorder):
    listener = registered(Listener(blocked=True))
    end(recorder, "first")  # would not return if it waited for the listener
    assert listener.entered.wait(PATIENCE_S)
    end(recorder, "second")
    assert not listener.spans
    listener.free.set()
    assert listeners.flush(PATIENCE_S)
    assert [span.name for span in listener.spans] == ["first", "second"]


def test_spans_are_delivered_while_a_listener_hangs(registered, tmp_path, monkeypatch):
    from lightning_spans import agent, open_store
    from lightning_spans.record.attach import attach
    from lightning_spans.record.pipeline import live_recorder

    monkeypatch.setenv("LIGHTNING_SPOOL", str(tmp_path / "spool"))
    listener = registered(Listener(blocked=True))
    with attach("openai", store=str(tmp_path / "own.db")):
        with agent("writer"):
            pass
        assert listener.entered.wait(PATIENCE_S)
        assert live_recorder().tracer.flush(PATIENCE_S)
        store = open_store(str(tmp_path / "own.db"))
        assert [span.name for span in store.spans()] == ["writer"]
        store.close()
        listener.free.set()


def test_listeners_are_told_in_the_order_of_the_ends_off_the_agents_thread(registered, listeners, recorder):
    threads = set()

    class Thread:
        @hookimpl
        def lightning_span_ended(self, span):
            threads.add(threading.current_thread())

    listener = registered(Listener())
    registered(Thread())
    for number in range(20):
        end(recorder, str(number))
        assert listeners.flush(PATIENCE_S)
    assert [span.name for span in listener.spans] == [str(number) for number in range(20)]
    assert len(threads) == 1
    assert threading.current_thread() not in threads


@pytest.mark.parametrize("error", [RuntimeError, SystemExit])
def test_a_listener_that_raises_is_logged_and_the_next_one_is_told(registered, listeners, recorder, caplog, error):
    class Raises:
        @hookimpl
        def lightning_span_ended(self, span):
            raise error(span.name)

    first, _, last = registered(Listener()), registered(Raises()), registered(Listener())
    with caplog.at_level(logging.ERROR, logger="lightning_spans"):
        end(recorder, "a", "b")
        assert listeners.flush(PATIENCE_S)
    assert [span.name for span in first.spans] == [span.name for span in last.spans] == ["a", "b"]
    assert "lightning_span_ended of plugin listener-1 failed" in caplog.text
    assert f"{error.__name__}: b" in caplog.text


def test_what_does_not_fit_the_queue_is_not_told_and_that_is_logged(registered, listeners, recorder, caplog):
    listener = registered(Listener(blocked=True))
    end(recorder, "taken")
    assert listener.entered.wait(PATIENCE_S)
    with caplog.at_level(logging.WARNING, logger="lightning_spans"):
        end(recorder, "1", "2", "3", "4")
    assert "gets no more spans" in caplog.text
    listener.free.set()
    assert listeners.flush(PATIENCE_S)
    assert [span.name for span in listener.spans] == ["taken", "1", "2", "3"]


def test_closing_waits_only_so_long_for_a_listener_that_hangs(registered, monkeypatch, caplog):
    monkeypatch.setattr("lightning_spans.record.tracing.listeners.CLOSE_S", 0.01)
    listeners, listener = Listeners(), registered(Listener(blocked=True))
    end(SpanRecorder(make_tracer("embedded", ListSink()), on_end=listeners.tell), "a", "b")
    assert listener.entered.wait(PATIENCE_S)
    with caplog.at_level(logging.WARNING, logger="lightning_spans"):
        listeners.close()
    assert "it does not get 1 spans" in caplog.text
    listener.free.set()


def test_without_a_listener_there_is_no_thread(listeners, recorder):
    end(recorder, "a")
    assert listeners._thread is None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_tells_its_own_listeners(registered, listeners, recorder):
    listener = registered(Listener())
    end(recorder, "parent")
    assert listeners.flush(PATIENCE_S)
    child = os.fork()
    if child == 0:
        end(recorder, "child")
        told = listeners.flush(PATIENCE_S) and [span.name for span in listener.spans] == ["parent", "child"]
        os._exit(0 if told else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


class Names:
    def __init__(self, answer, free=None):
        self.answer, self.free, self.asked = answer, free, []

    @hookimpl
    def lightning_agent_name(self, span):
        self.asked.append(span.name)
        if self.free is not None:
            assert self.free.wait(PATIENCE_S)
        return self.answer


def named(naming, *called):
    sink = ListSink()
    recorder = SpanRecorder(make_tracer("embedded", sink), name_agent=naming)
    for name in called:
        recorder.start(names.CHAT, name).end()
    return [span.agent for span in sink.spans]


def test_a_plugin_names_the_agent_of_a_span_that_has_none(registered):
    registered(Names("writer"))
    naming = Naming()
    assert named(naming, "a", "b") == ["writer", "writer"]
    naming.close()


@pytest.mark.parametrize("tracer", TRACERS)
def test_a_plugin_names_an_agent_by_what_was_current_when_the_span_began(tracer, registered):
    class Teams:
        @hookimpl
        def lightning_agent_name(self, span):
            return get_value("team", span.context)

    registered(Teams())
    naming, sink = Naming(), ListSink()
    recorder = SpanRecorder(make_tracer(tracer, sink), name_agent=naming)
    span = recorder.start(names.CHAT, "m", context=Context({"team": "sales"}))
    span.end()
    assert [span.agent for span in sink.spans] == ["sales"]
    assert get_value("team", span.context) is None  # nothing of it is held any longer
    naming.close()


def test_a_plugin_that_hangs_while_it_names_is_waited_for_once(registered, caplog):
    free = threading.Event()
    plugin = registered(Names("writer", free))
    naming = Naming(limit_s=0.01)
    with caplog.at_level(logging.ERROR, logger="lightning_spans"):
        assert named(naming, "a", "b", "c") == [None, None, None]
    assert plugin.asked == ["a"]
    assert "takes longer than 0.01 s" in caplog.text
    free.set()
    assert naming._overdue.answered.wait(PATIENCE_S)
    naming._limit_s = PATIENCE_S
    assert named(naming, "d") == ["writer"]
    naming.close()


def test_naming_that_raises_is_logged_and_the_span_is_kept(registered, caplog):
    class Raises:
        @hookimpl
        def lightning_agent_name(self, span):
            raise RuntimeError("naming broke")

    registered(Raises())
    naming = Naming()
    with caplog.at_level(logging.ERROR, logger="lightning_spans"):
        assert named(naming, "a") == [None]
    assert "lightning_agent_name failed" in caplog.text
    naming.close()


def test_naming_that_would_end_the_program_ends_no_thread(registered, caplog):
    class Exits(Names):
        @hookimpl
        def lightning_agent_name(self, span):
            if span.name == "a":
                raise SystemExit
            return super().lightning_agent_name(span)

    registered(Exits("writer"))
    naming = Naming(limit_s=PATIENCE_S)
    with caplog.at_level(logging.ERROR, logger="lightning_spans"):
        assert named(naming, "a", "b") == [None, "writer"]
    assert "lightning_agent_name failed" in caplog.text
    naming.close()
