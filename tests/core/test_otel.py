"""The tracer ``otel``: real spans of OpenTelemetry's SDK, for processors that are given and for a collector."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from lightning_spans import Attempt, agent, attach, hookimpl, hooks, open_store, use_attempt
from lightning_spans.errors import AttachError, ConfigError
from lightning_spans.record import stalls
from lightning_spans.record.delivery.http import Posts
from lightning_spans.record.delivery.otlp import flatten
from lightning_spans.record.delivery.otlp_reader import decode
from lightning_spans.record.pipeline import live_recorder
from lightning_spans.schema import spans as names

PATIENCE_S = 60.0


class Toy:
    @hookimpl
    def lightning_attach(self, framework, recorder):
        return (lambda: None) if framework == "toy" else None


@pytest.fixture(autouse=True)
def toy(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("OTEL_SDK_DISABLED", "OTEL_EXPORTER_OTLP_HEADERS", "LIGHTNING_OTLP"):
        monkeypatch.delenv(name, raising=False)
    hooks.register(Toy(), "toy")
    yield
    hooks.unregister("toy")


def stored():
    store = open_store("lightning.db")
    try:
        return store.spans()
    finally:
        store.close()


def a_chat(**attributes):
    live_recorder().start(names.CHAT, "model", attributes={names.RESPONSE_ID: "x", **attributes}).end(error="broke")


class Collector:
    """An OTLP/HTTP receiver; answers with `status`."""

    def __init__(self):
        self.status = 200
        self.spans = []
        self.headers = []
        self.came = threading.Condition()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                body = self.rfile.read(int(self.headers["content-length"]))
                with collector.came:
                    collector.headers.append(dict(self.headers))
                    if collector.status == 200:
                        collector.spans += decode(body)
                    collector.came.notify_all()
                self.send_response(collector.status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1/traces"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def collector():
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    made = Collector()
    yield made
    made.close()


def test_a_processor_sees_real_spans_that_are_those_of_the_store():
    exporter = InMemorySpanExporter()
    with attach("toy", span_processors=[SimpleSpanProcessor(exporter)]) as attachment:
        with use_attempt(Attempt("r1", "a1")), agent("writer"):
            a_chat()
        assert attachment.flush(PATIENCE_S)
        real = {f"{span.context.span_id:016x}": span for span in exporter.get_finished_spans()}
    ours = stored()
    assert len(ours) == len(real) == 2
    for span in ours:
        seen = real[span.span_id]
        assert isinstance(seen, ReadableSpan)
        assert f"{seen.context.trace_id:032x}" == span.trace_id
        assert (f"{seen.parent.span_id:016x}" if seen.parent else None) == span.parent_id
        assert flatten(span).items() <= dict(seen.attributes).items()
        assert (seen.start_time, seen.end_time, seen.name) == (span.start_ns, span.end_ns, span.name)
        assert seen.status.status_code.name == span.status.upper()
        assert seen.attributes["openinference.span.kind"] == {"chat": "LLM"}.get(span.operation, "AGENT")


def test_processors_read_a_model_call_in_openinferences_words():
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    asked = {"model": "m", "temperature": 0.5, "messages": [{"role": "user", "content": "2+2?"}], "tools": [tool]}
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
    answered = {"choices": [{"index": 0, "message": {"role": "assistant", "content": None, "tool_calls": [call]}}]}
    exporter = InMemorySpanExporter()
    with attach("toy", span_processors=[SimpleSpanProcessor(exporter)]) as attachment:
        given = {names.PROVIDER: "openai", names.REQUEST_MODEL: "m", names.INPUT_TOKENS: 7, names.OUTPUT_TOKENS: 3}
        a_chat(**given, **{names.REQUEST: json.dumps(asked), names.RESPONSE: json.dumps(answered)})
        assert attachment.flush(PATIENCE_S)
    (seen,) = (dict(span.attributes) for span in exporter.get_finished_spans())
    wanted = {
        "llm.provider": "openai",
        "llm.model_name": "m",
        "llm.token_count.prompt": 7,
        "llm.token_count.completion": 3,
        "llm.input_messages.0.message.role": "user",
        "llm.input_messages.0.message.content": "2+2?",
        "llm.output_messages.0.message.role": "assistant",
        "llm.output_messages.0.message.tool_calls.0.tool_call.id": "c1",
        "llm.output_messages.0.message.tool_calls.0.tool_call.function.name": "add",
        "llm.output_messages.0.message.tool_calls.0.tool_call.function.arguments": '{"a": 2}',
        "input.mime_type": "application/json",
        "output.mime_type": "application/json",
    }
    assert wanted.items() <= seen.items()
    assert json.loads(seen["llm.invocation_parameters"]) == {"temperature": 0.5}
    assert json.loads(seen["llm.tools.0.tool.json_schema"]) == tool


def test_the_users_global_provider_is_left_as_it_is():
    before = trace.get_tracer_provider()
    with attach("toy", span_processors=[SimpleSpanProcessor(InMemorySpanExporter())]):
        with trace.get_tracer("user").start_as_current_span("theirs"):
            a_chat()
        assert trace.get_tracer_provider() is before
    assert stored()[0].parent_id is None


def test_without_anybody_to_see_them_the_sdk_makes_no_spans():
    with attach("toy"):
        span = live_recorder().start(names.CHAT, "model")
        assert span.handle is None
        span.end()
    assert len(stored()) == 1


def test_the_sdk_switched_off_leaves_recording_on(monkeypatch, caplog):
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    exporter = InMemorySpanExporter()
    with attach("toy", span_processors=[SimpleSpanProcessor(exporter)]) as attachment:
        a_chat()
        assert attachment.flush(PATIENCE_S)
    assert len(stored()) == 1
    assert not exporter.get_finished_spans()
    assert "OTEL_SDK_DISABLED" in caplog.text


def test_the_embedded_tracer_refuses_what_it_would_not_call():
    with pytest.raises(ConfigError, match="otel"):
        attach("toy", tracer="embedded", span_processors=[SimpleSpanProcessor(InMemorySpanExporter())])


def test_a_processor_that_raises_harms_neither_the_agent_nor_another_one(caplog):
    class Broken(SpanProcessor):
        def on_start(self, span, parent_context=None):
            raise RuntimeError("at the start")

        def on_end(self, span):
            raise RuntimeError("at the end")

    exporter = InMemorySpanExporter()
    with attach("toy", span_processors=[Broken(), SimpleSpanProcessor(exporter)]) as attachment:
        a_chat()
        assert attachment.flush(PATIENCE_S)
        assert len(exporter.get_finished_spans()) == 1
    assert len(stored()) == 1
    assert "on_start of" in caplog.text
    assert "on_end of" in caplog.text


def test_a_processor_that_hangs_keeps_the_agent_waiting_for_nothing(monkeypatch):
    monkeypatch.setattr("lightning_spans.record.delivery.sink.DETACH_S", 0.05)
    entered, free = threading.Event(), threading.Event()

    class Hangs(SpanProcessor):
        def on_end(self, span):
            entered.set()
            assert free.wait(PATIENCE_S)

    attachment = attach("toy", span_processors=[Hangs()])
    a_chat()
    assert entered.wait(PATIENCE_S)
    a_chat()  # would not return if it waited
    attachment.detach()
    free.set()


def test_processors_see_what_is_recorded_and_nothing_that_is_masked(monkeypatch):
    monkeypatch.setenv("LIGHTNING_REDACT", "/secret/")
    exporter = InMemorySpanExporter()
    with attach("toy", span_processors=[SimpleSpanProcessor(exporter)]) as attachment:
        a_chat(**{names.REQUEST: '{"messages": [{"role": "user", "content": "the secret"}]}'})
        assert attachment.flush(PATIENCE_S)
    (seen,) = exporter.get_finished_spans()
    assert "secret" not in str(dict(seen.attributes))
    assert "__REDACTED__" in str(dict(seen.attributes))


def test_processors_see_the_traces_that_are_sampled_and_no_other(monkeypatch):
    monkeypatch.setenv("LIGHTNING_SAMPLE", "0.5")
    exporter = InMemorySpanExporter()
    with attach("toy", span_processors=[SimpleSpanProcessor(exporter)]) as attachment:
        for _ in range(40):
            with agent("writer"):
                a_chat()
        with use_attempt(Attempt("r1", "a1")):
            a_chat()
        assert attachment.flush(PATIENCE_S)
    seen = {f"{span.context.span_id:016x}" for span in exporter.get_finished_spans()}
    assert seen == {span.span_id for span in stored()}
    assert 1 < len(seen) < 81
    assert "r1" in {span.attributes.get(names.ROLLOUT_ID) for span in exporter.get_finished_spans()}


def test_a_collector_gets_every_span_from_the_sdks_own_exporter(collector, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "api-key=mine")
    with attach("toy", otlp=collector.url) as attachment:
        with agent("writer"):
            a_chat()
        assert attachment.flush(PATIENCE_S)
    assert {span.span_id: flatten(span).items() for span in stored()}.keys() == {s.span_id for s in collector.spans}
    assert {span.attributes["openinference.span.kind"] for span in collector.spans} == {"LLM", "AGENT"}
    said = {name.lower(): value for name, value in collector.headers[0].items()}
    assert said["api-key"] == "mine"
    assert said["user-agent"].startswith("OTel-OTLP-Exporter-Python")


def test_what_a_collector_did_not_take_is_spooled_and_sent_when_it_is_there_again(collector, monkeypatch, caplog):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "api-key=mine")
    monkeypatch.setattr("lightning_spans.record.delivery.sink.RETRY_S", (0.05,))
    collector.status = 503
    with attach("toy", otlp=collector.url) as attachment:
        a_chat()
        assert attachment.flush(PATIENCE_S)
        assert not collector.spans
        assert "1 spans are not sent" in caplog.text
        collector.status = 200
        with collector.came:
            assert collector.came.wait_for(lambda: collector.spans, PATIENCE_S)
    assert [span.span_id for span in collector.spans] == [span.span_id for span in stored()]
    assert {name.lower(): value for name, value in collector.headers[-1].items()}["api-key"] == "mine"


def test_what_a_collector_that_never_answers_has_not_taken_is_spooled(monkeypatch, tmp_path):
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        attachment = attach("toy", otlp=f"http://127.0.0.1:{silent.getsockname()[1]}/v1/traces")
        a_chat()
        a_chat()
        monkeypatch.setattr("lightning_spans.record.delivery.sink.DETACH_S", 0.2)
        attachment.detach()
        waiting = "".join(path.read_text() for path in (tmp_path / "lightning-spool").glob("*.spans"))
    ours = stored()
    assert len(ours) == 2 or waiting.count('"url":"store:') == 1  # a busy machine spools what is for the store, too
    assert waiting.count('"span_id"') >= 2


@pytest.mark.parametrize("status", [400, 500])
@pytest.mark.parametrize("tracer", ["otel", "embedded"])
def test_a_password_in_a_collectors_address_is_in_no_log_and_in_no_stall(
    collector, monkeypatch, caplog, tracer, status
):
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    monkeypatch.setitem(stalls._bounds, "sink delivery", 1e-9)
    waits = []
    post = Posts.__call__
    monkeypatch.setattr(Posts, "__call__", lambda *given: waits.extend(map(str, stalls.stalls())) or post(*given))
    collector.status = status
    with attach("toy", otlp=collector.url.replace("://", "://ada:hunter2@"), tracer=tracer) as attachment:
        a_chat()
        assert attachment.flush(PATIENCE_S)
    told = [*(record.getMessage() for record in caplog.records), *waits]
    assert any(f"://***@{collector.url.removeprefix('http://')}" in text for text in told)
    assert (tracer == "otel") or waits
    assert not any("hunter2" in text for text in [*told, caplog.text])


def test_a_password_of_the_store_is_not_told_where_options_do_not_agree():
    shown = r"://\*\*\*@127.0.0.1:9/traces'.*api-key=\*\*\*'.*Detach it first"
    with (
        attach("toy", store="postgresql://ada:hun/ter2@127.0.0.1:9/traces"),
        pytest.raises(AttachError, match=shown) as told,
    ):
        attach("toy", otlp="http://127.0.0.1:9/v1/traces?api-key=hunter2")
    assert "ter2" not in str(told.value)


@pytest.mark.parametrize(
    "store", ["mysql://ada:hunter2@host/x", "postgres!://ada:hunter2@host/x", "postgresql://ada:hunter2@host:port/x"]
)
def test_a_password_of_a_store_that_is_refused_is_not_told(store):
    with pytest.raises(ConfigError, match=r"://\*\*\*@host") as told:
        open_store(store)
    assert "hunter2" not in str(told.value)


FORKED = """
import os
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from lightning_spans import agent, attach, hookimpl, hooks

class Toy:
    @hookimpl
    def lightning_attach(self, framework, recorder):
        return lambda: None

hooks.register(Toy(), "toy")
exporter = InMemorySpanExporter()
attachment = attach("toy", span_processors=[SimpleSpanProcessor(exporter)])
with agent("parent"):
    pass
assert attachment.flush(60)
child = os.fork()
if child == 0:
    with agent("child"):
        pass
    attachment.flush(60)
    os._exit(0 if [span.name for span in exporter.get_finished_spans()] == ["parent", "child"] else 3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_processors_see_the_spans_of_a_forked_child(tmp_path):
    subprocess.run([sys.executable, "-c", FORKED], check=True, timeout=240, cwd=tmp_path)


AT_THE_END = """
from opentelemetry.sdk.trace import SpanProcessor
from lightning_spans import agent, attach, hookimpl, hooks

class Toy:
    @hookimpl
    def lightning_attach(self, framework, recorder):
        return lambda: None

class Prints(SpanProcessor):
    def on_end(self, span):
        print("ended", span.name)
    def shutdown(self):
        print("shut down")

hooks.register(Toy(), "toy")
attach("toy", span_processors=[Prints()])
with agent("writer"):
    pass
"""


def test_a_program_that_ends_without_detaching_shows_all_and_shuts_processors_down(tmp_path):
    command = [sys.executable, "-c", AT_THE_END]
    ran = subprocess.run(command, check=True, timeout=240, cwd=tmp_path, capture_output=True, text=True)
    assert ran.stdout.splitlines() == ["ended writer", "shut down"], ran.stderr
