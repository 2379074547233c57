from __future__ import annotations

import asyncio
import logging
import random
import threading
import weakref
from dataclasses import replace

import pytest
from opentelemetry.context import Context

from lightning_spans import Attempt, use_attempt
from lightning_spans.record.context import (
    current_agent,
    current_attempt,
    from_environment,
    use_context,
    with_agent,
    with_attempt,
)
from lightning_spans.record.delivery.otlp import flatten
from lightning_spans.record.recorder import SpanRecorder, agent_path, current_span
from lightning_spans.record.tracing.tracers import TRACERS, make_tracer
from lightning_spans.schema import spans as names
from support.fake_sink import ListSink


@pytest.fixture
def sink():
    return ListSink()


@pytest.fixture(params=TRACERS)
def recorder(request, sink):
    recorder = SpanRecorder(make_tracer(request.param, sink))
    yield recorder
    recorder.tracer.close(5.0)


def test_a_span_lands_under_the_one_that_is_open_around_it(recorder, sink):
    outer = recorder.start(names.INVOKE_AGENT, "writer", agent="writer")
    with use_context(outer.context):
        inner = recorder.start(names.CHAT, "model")
        inner.end()
    outer.end()
    chat, agent = sink.spans
    assert chat.parent_id == agent.span_id
    assert chat.trace_id == agent.trace_id
    assert agent.parent_id is None
    assert chat.agent == "writer"


def test_a_root_takes_its_attempt_from_the_context_and_a_child_from_its_parent(recorder, sink):
    with use_attempt(Attempt("r1", "a1")):
        root = recorder.start(names.INVOKE_AGENT, "writer")
    with use_attempt(Attempt("r2", "a2")):  # the context has moved on: the child still belongs to its parent's attempt
        child = recorder.start(names.CHAT, "model", parent=root)
    child.end()
    root.end()
    assert {(span.rollout_id, span.attempt_id) for span in sink.spans} == {("r1", "a1")}


def test_two_attempts_in_one_process_never_mix(recorder, sink):
    async def rollout(number: int) -> None:
        with use_attempt(Attempt(f"r{number}", f"a{number}")), use_context(with_agent(f"agent{number}")):
            for _ in range(5):
                await asyncio.sleep(0)
                recorder.start(names.CHAT, "model").end()

    async def both() -> None:
        await asyncio.gather(*(rollout(n) for n in range(8)))

    asyncio.run(both())
    assert len(sink.spans) == 40
    assert all(span.rollout_id[1:] == span.attempt_id[1:] == span.agent[5:] for span in sink.spans)


def test_a_late_span_of_a_finished_attempt_stays_its_own(recorder, sink):
    with use_attempt(Attempt("r1", "a1")):
        late = recorder.start(names.CHAT, "model")
    with use_attempt(Attempt("r2", "a2")):
        late.end()
    assert sink.spans[0].rollout_id == "r1"


def test_the_second_end_changes_nothing(recorder, sink):
    span = recorder.start(names.CHAT, "model")
    span.end()
    span.end(error="late")
    assert [s.status for s in sink.spans] == ["ok"]


def test_an_error_is_kept_with_its_type(recorder, sink):
    recorder.start(names.EXECUTE_TOOL, "sum").end(error=ValueError("no digits"))
    (span,) = sink.spans
    assert (span.status, span.status_message, span.attributes[names.ERROR_TYPE]) == ("error", "no digits", "ValueError")


def test_both_tracers_give_identical_records(sink):
    records = []
    for kind in TRACERS:
        taken = ListSink()
        recorder = SpanRecorder(make_tracer(kind, taken))
        with use_attempt(Attempt("r1", "a1")):
            outer = recorder.start(names.INVOKE_AGENT, "writer", agent="writer", start_ns=10)
            inner = recorder.start(
                names.EXECUTE_TOOL,
                "sum",
                parent=outer,
                start_ns=20,
                attributes={
                    names.TOOL_NAME: "sum",
                    names.FINISH_REASONS: ["stop", "length"],
                    names.INPUT_TOKENS: 3,
                    names.REQUEST_TEMPERATURE: 0.5,
                    names.STREAMED: True,
                    names.REQUEST: "x" * 5000,
                    names.RESPONSE_ID: None,
                },
            )
        inner.end(error="broke", end_ns=30)
        outer.end(end_ns=40)
        ids = {span.span_id: n for n, span in enumerate(taken.spans)}
        records.append(
            [
                replace(s, trace_id="t", span_id=str(ids[s.span_id]), parent_id=s.parent_id and str(ids[s.parent_id]))
                for s in taken.spans
            ]
        )
        recorder.tracer.close(5.0)
    assert records[0] == records[1]


def test_spans_of_the_otel_tracer_are_real_ones_with_the_same_ids_and_attributes(sink):
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    tracer = make_tracer("otel", sink, [SimpleSpanProcessor(exporter)])
    recorder = SpanRecorder(tracer)
    with use_attempt(Attempt("r1", "a1")):
        outer = recorder.start(names.INVOKE_AGENT, "writer", agent="writer")
        recorder.start(names.CHAT, "model", parent=outer, attributes={names.RESPONSE_ID: "x"}).end(error="broke")
        outer.end()
    assert tracer.flush(60.0)
    for real, ours in zip(exporter.get_finished_spans(), sink.spans, strict=True):
        assert f"{real.context.span_id:016x}" == ours.span_id
        assert (f"{real.parent.span_id:016x}" if real.parent else None) == ours.parent_id
        assert flatten(ours).items() <= dict(real.attributes).items()
        assert (real.start_time, real.end_time) == (ours.start_ns, ours.end_ns)
        assert real.status.status_code.name == ours.status.upper()


def test_a_program_that_seeds_random_gets_the_numbers_it_got_without_us(recorder):
    ids = set()
    for _ in range(2):
        random.seed(0)
        span = recorder.start("chat", "m")
        ids |= {span.trace_id, span.span_id}
        assert random.random() == random.Random(0).random()
    assert len(ids) == 4


def test_limits_that_the_user_set_for_his_own_traces_cut_nothing_of_ours(monkeypatch, sink):
    monkeypatch.setenv("OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT", "10")
    monkeypatch.setenv("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "1")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    recorder = SpanRecorder(make_tracer("otel", sink))
    recorder.start(names.CHAT, "model", attributes={names.REQUEST: "x" * 100, names.RESPONSE: "y"}).end()
    assert sink.spans[0].attributes == {names.REQUEST: "x" * 100, names.RESPONSE: "y"}


def test_the_users_own_tracing_is_left_alone(sink):
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider

    before = trace.get_tracer_provider()
    theirs = TracerProvider().get_tracer("user")
    recorder = SpanRecorder(make_tracer("otel", sink))
    with theirs.start_as_current_span("their span"):
        recorder.start(names.CHAT, "model").end()
    assert trace.get_tracer_provider() is before
    assert sink.spans[0].parent_id is None, "a span that is not in our store is no parent: the chat would be an orphan"


def test_a_raising_listener_harms_nothing(sink, caplog):
    def listener(span):
        raise RuntimeError("listener broke")

    recorder = SpanRecorder(make_tracer("embedded", sink), on_end=listener)
    with caplog.at_level(logging.ERROR, logger="lightning_spans"):
        recorder.start(names.CHAT, "model").end()
    assert len(sink.spans) == 1
    assert "lightning_span_ended" in caplog.text


def test_what_fails_in_a_guarded_block_is_not_raised_and_the_plugin_is_named(recorder, caplog):
    with caplog.at_level(logging.ERROR, logger="lightning_spans"), recorder.guard("langchain"):
        raise RuntimeError("broke")
    assert "langchain" in caplog.text


def test_an_agent_is_named_by_a_plugin_only_when_nothing_else_did(sink):
    recorder = SpanRecorder(make_tracer("embedded", sink), name_agent=lambda span: "named")
    recorder.start(names.CHAT, "model").end()
    recorder.start(names.CHAT, "model", agent="writer").end()
    assert [span.agent for span in sink.spans] == ["named", "writer"]


def test_calls_are_rerouted_only_for_agents_that_both_sides_name(sink):
    attempt = Attempt("r", "a", endpoint="http://127.0.0.1:1", agents=("writer", "checker"))
    recorder = SpanRecorder(make_tracer("embedded", sink), agents=["writer"])
    with use_attempt(attempt):
        routed = {
            name: recorder.reroutes(recorder.start(names.CHAT, "m", agent=name))
            for name in ("writer", "checker", "rewriter", None)
        }
    assert routed == {"writer": True, "checker": False, "rewriter": False, None: False}


def test_the_environment_of_a_runner_is_an_attempt(monkeypatch):
    attempt = Attempt("r", "a", endpoint="http://127.0.0.1:1", key="k", agents=("a b", "c*", "d, e%2C"), model="m")
    for name, value in attempt.environment().items():
        monkeypatch.setenv(name, value)
    assert from_environment() == attempt
    assert current_attempt() == attempt


def test_the_context_does_not_leak_out_of_its_block():
    with use_context(with_agent("writer")):
        assert current_agent() == "writer"
    assert current_agent() is None
    seen = []
    thread = threading.Thread(target=lambda: seen.append(current_agent()))
    thread.start()
    thread.join()
    assert seen == [None]


def test_a_tracer_that_there_is_not_is_a_clear_error(sink):
    from lightning_spans.errors import ConfigError

    with pytest.raises(ConfigError, match="otel, embedded"):
        make_tracer("jaeger", sink)


def test_what_one_attempt_does_is_one_trace(recorder, sink):
    with use_attempt(Attempt("r", "a1", endpoint="http://trainer")):
        first, second = recorder.start("chat", "m"), recorder.start("chat", "m")
    with use_attempt(Attempt("r", "a2", endpoint="http://trainer")):
        other = recorder.start("chat", "m")
    alone = [recorder.start("chat", "m") for _ in range(2)]
    assert first.parent is second.parent is None
    assert first.trace_id == second.trace_id
    assert len({first.trace_id, other.trace_id, *(span.trace_id for span in alone)}) == 4


def test_a_call_says_where_its_agent_stands(recorder):
    boss = recorder.start("invoke_agent", "boss", agent="boss")
    writer = recorder.start("invoke_agent", "writer", agent="writer", context=boss.context)
    calls = [recorder.start("chat", "m", context=each.context) for each in (boss, writer)]
    assert [(call.agent, call.path) for call in calls] == [("boss", "boss"), ("writer", "boss/writer")]
    assert [call.attributes.get(names.AGENT_PATH) for call in calls] == [None, "boss/writer"]
    tool = recorder.start("execute_tool", "t", agent="other", context=boss.context)
    assert tool.path == "boss/other"


def test_an_agents_path_tells_what_is_around_it(recorder):
    assert agent_path("a/b") == "a//b"
    team = recorder.start("invoke_workflow", "team", attributes={names.AGENT_PATH: "team"})
    boss = recorder.start("invoke_agent", "boss/1", context=team.context)
    tool = recorder.start("execute_tool", "ask", context=boss.context)
    assert agent_path("writer", team.context) == "team/writer"
    assert agent_path("writer", tool.context) == boss.attributes[names.AGENT_PATH] + "/writer" == "team/boss//1/writer"


def test_a_span_that_has_ended_keeps_its_place_and_nothing_of_what_was_around_it(recorder):
    class Thing:
        pass

    attempt, thing = Attempt("r", "a"), Thing()
    kept = weakref.ref(thing)
    with use_context(Context({**with_attempt(attempt), "theirs": thing})):
        span = recorder.start(names.INVOKE_AGENT, "writer", agent="writer")
        assert span.context["theirs"] is thing
        span.end()
    del thing
    assert kept() is None, "what waits for its delivery holds memory of the agent's"
    late = recorder.start(names.CHAT, "m", parent=span)
    assert (late.parent, late.agent, late.attempt) == (span, "writer", attempt)
    assert current_span(span.context) is span


@pytest.mark.parametrize("kind", TRACERS)
@pytest.mark.parametrize("given", ["context", "parent"])
def test_a_span_of_another_store_is_no_parent(sink, kind, given):
    earlier, later = (SpanRecorder(make_tracer(kind, sink), store=store) for store in ("one.db", "two.db"))
    with use_attempt(Attempt("r", "a")):
        outer = earlier.start(names.INVOKE_AGENT, "writer", agent="writer")
    span = later.start(names.CHAT, "m", **{given: outer if given == "parent" else outer.context})
    assert (span.parent_id, span.agent, span.attempt) == (None, "writer", Attempt("r", "a"))
    assert span.trace_id != outer.trace_id


@pytest.mark.parametrize(
    ("store", "attempt"),
    [("one.db", None), ("one.db", Attempt("r", "a")), ("two.db", Attempt("r", "a", endpoint="http://127.0.0.1:1"))],
)
def test_a_span_of_an_earlier_recorder_is_a_parent_where_both_go_to_one_store(sink, store, attempt):
    earlier, later = (SpanRecorder(make_tracer("embedded", sink), store=path) for path in ("one.db", store))
    with use_attempt(attempt) if attempt is not None else use_context(Context()):
        outer = earlier.start(names.INVOKE_AGENT, "writer", agent="writer")
        with use_context(outer.context):
            span = later.start(names.CHAT, "m")
    assert (span.parent, span.trace_id, span.agent, span.attempt) == (outer, outer.trace_id, "writer", attempt)
