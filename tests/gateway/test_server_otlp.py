"""The OTLP receiver: our spans, anybody's spans, and what is refused."""

from __future__ import annotations

import base64
import gzip
import json
import threading
import time
from contextlib import closing
from dataclasses import replace

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_spans.errors import RefusedError, StoreError
from lightning_spans.record.delivery.deliver import Delivery, Destination
from lightning_spans.record.delivery.otlp import encode
from lightning_spans.record.delivery.outbox import Spool
from lightning_spans.record.delivery.sink import BatchSink
from lightning_spans.schema import spans as names
from lightning_spans.schema.attempts import Attempt, Rollout
from lightning_spans.schema.json import dumps, to_json
from lightning_spans.schema.spans import Span
from lightning_spans.store import open_store
from lightning_spans.store.http import HttpStore
from lightning_trainer.gateway.ingest.openinference import adopt_span
from lightning_trainer.gateway.settings import Limits
from support.fakes import served

PROTOBUF = {"content-type": "application/x-protobuf"}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with served(tmp_path_factory.mktemp("otlp")) as running:
        yield running


def test_our_spans_arrive_as_they_were_sent(server):
    spans = [_span("arrive", 1), _span("arrive", 2, attributes={names.TOOL_NAME: "calculator", "n": 3})]
    reply = _send(server, spans, key=server.key("arrive"))
    assert (reply.status_code, reply.content) == (200, b"")
    assert reply.headers["content-type"] == "application/x-protobuf"
    assert server.store.spans(attempt_ids=["arrive"]) == spans


def test_a_gzip_body_is_taken(server):
    body = gzip.compress(encode([_span("zipped", 1)]))
    headers = {**PROTOBUF, "content-encoding": "gzip", "authorization": f"Bearer {server.key('zipped')}"}
    assert httpx.post(f"{server.url}/v1/traces", content=body, headers=headers).status_code == 200
    assert len(server.store.spans(attempt_ids=["zipped"])) == 1


def test_wait_for_spans_twice_are_stored_once(server):
    for _ in range(2):
        assert _send(server, [_span("twice", 1)], key=server.key("twice")).status_code == 200
    assert len(server.store.spans(attempt_ids=["twice"])) == 1


def test_spans_of_another_attempt_are_refused_and_the_sender_is_told(server):
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

    spans = [_span("mine", 1), _span("theirs", 2), _span(None, 3, rollout_id="rollout of theirs")]
    reply = _send(server, spans, key=server.key("mine"))
    told = ExportTraceServiceResponse.FromString(reply.content).partial_success
    assert reply.status_code == 200
    assert told.rejected_spans == 2
    assert "another attempt" in told.error_message
    assert [span.span_id for span in server.store.spans(attempt_ids=["mine"])] == [spans[0].span_id]
    assert server.store.spans(attempt_ids=["theirs"]) == []


def test_spans_that_name_no_attempt_belong_to_the_keys(server):
    _send(server, [_span(None, 7)], key=server.key("finder"))
    (span,) = server.store.spans(attempt_ids=["finder"])
    assert span.rollout_id == "rollout of finder"


def test_a_runners_key_sends_spans_of_all_attempts_that_it_claimed(server):
    server.store.enqueue([Rollout(rollout_id=f"{name} of two", group_id="g", task={}) for name in ("one", "two")])
    key = server.keys.issue("runner")
    with closing(HttpStore(server.url, key=key)) as runner:
        claimed = [attempt.attempt_id for attempt in runner.claim("w", limit=2)]
    spans = [_span(name, number, rollout_id=name.rpartition(".")[0]) for number, name in enumerate(claimed, 1)]
    assert _send(server, [*spans, _span("of nobody", 3)], key=key).status_code == 200
    assert server.store.spans(attempt_ids=[*claimed, "of nobody"]) == spans


def test_late_spans_of_an_ended_attempt_are_taken_for_a_while(tmp_path):
    with served(tmp_path, limits=Limits(late_spans_s=0.4)) as server:
        key = server.key("late")
        server.end("late")
        assert _send(server, [_span("late", 1)], key=key).status_code == 200
        time.sleep(0.5)
        assert _send(server, [_span("late", 2)], key=key).status_code == 401
        assert len(server.store.spans(attempt_ids=["late"])) == 1


def test_json_is_taken_and_answered_in_json(server):
    span = {
        "traceId": "5B8EFFF798038103D269B633813FC60C",
        "spanId": "EEE19B7EC3C1B174",
        "name": "add",
        "startTimeUnixNano": "10",
        "endTimeUnixNano": "20",
        "attributes": [{"key": "gen_ai.operation.name", "value": {"stringValue": "execute_tool"}}],
    }
    other = {**span, "spanId": "EEE19B7EC3C1B175", "attributes": [_json_attribute("lightning.attempt.id", "else")]}
    body = {"resourceSpans": [{"scopeSpans": [{"spans": [span, other]}]}]}
    headers = {"authorization": f"Bearer {server.key('json')}"}
    reply = httpx.post(f"{server.url}/v1/traces", json=body, headers=headers)
    assert reply.json()["partialSuccess"]["rejectedSpans"] == "1"
    (kept,) = server.store.spans(attempt_ids=["json"])
    assert (kept.operation, kept.name, kept.span_id) == ("execute_tool", "add", "eee19b7ec3c1b174")


@pytest.mark.parametrize(
    ("content", "kind", "status"),
    [
        (b"\xff\xff\xff", "application/x-protobuf", 400),
        (b"{}}", "application/json", 400),
        (b'{"resourceSpans": [{"scopeSpans": [{"spans": [{"traceId": "12"}]}]}]}', "application/json", 400),
        (b"a: 1", "text/yaml", 415),
    ],
)
def test_what_is_not_otlp_is_refused(server, content, kind, status):
    headers = {"content-type": kind, "authorization": f"Bearer {server.keys.issue('admin')}"}
    assert httpx.post(f"{server.url}/v1/traces", content=content, headers=headers).status_code == status


def test_a_full_queue_tells_the_sender_to_come_again(tmp_path):
    gate = threading.Event()

    class Stuck:
        def __init__(self, store):
            self._store = store

        def add_spans(self, spans):
            gate.wait(60)
            return self._store.add_spans(spans)

        def __getattr__(self, name):
            return getattr(self._store, name)

    store = Stuck(open_store(str(tmp_path / "s.db")))
    with served(tmp_path, store=store, limits=Limits(waiting_spans=10)) as server:
        key = server.key("busy")
        spans = [_span("busy", number) for number in range(1, 9)]
        waiting = threading.Thread(target=_send, args=(server, spans), kwargs={"key": key})
        waiting.start()
        time.sleep(0.3)
        refused = _send(server, [_span("busy", number) for number in range(11, 16)], key=key)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        gate.set()
        waiting.join()
        assert _send(server, [_span("busy", number) for number in range(11, 16)], key=key).status_code == 200
        assert len(server.store.spans(attempt_ids=["busy"])) == 13
        counted = httpx.get(f"{server.url}/metrics").text
        assert 'lightning_spans_total{outcome="refused"} 5.0' in counted
        assert 'lightning_spans_total{outcome="kept"} 13.0' in counted


def test_a_process_that_works_in_several_attempts_reports_each_span_once(tmp_path):
    with served(tmp_path) as server:
        attempts = {name: Attempt("r", name, key=server.key(name)) for name in ("first", "second", "third")}
        delivery = Delivery(lambda: pytest.fail("no own store is needed"))

        def route(attempt):
            return [Destination(f"{server.url}/v1/traces", attempt.key)]

        sink = BatchSink(delivery, route=route, spool=Spool(tmp_path / "spool"), finish=delivery.close)
        delivery.reports = sink.reports
        for number, name in enumerate(["first", "first", "second", "second", "third"], start=1):
            sink.put(_span(name, number), attempts[name])
            assert sink.flush(60)
        sink.close()
        counted = httpx.get(f"{server.url}/metrics").text
    # what comes of a request can't be reported in the same one
    assert 'lightning_sender_spans_total{key="attempt",outcome="delivered"} 4.0' in counted


def test_a_store_that_fails_is_a_503(tmp_path):
    class Full:
        def __init__(self, store):
            self._store = store

        def add_spans(self, spans):
            raise StoreError("disk full")

        def __getattr__(self, name):
            return getattr(self._store, name)

    with served(tmp_path, store=Full(open_store(str(tmp_path / "s.db")))) as server:
        reply = _send(server, [_span("full", 1)], key=server.key("full"))
        assert (reply.status_code, "disk full" in reply.text) == (503, True)


def test_a_chat_span_of_openinference_becomes_ours():
    attributes = {
        "openinference.span.kind": "LLM",
        "llm.model_name": "gpt-4o",
        "llm.provider": "openai",
        "llm.invocation_parameters": '{"temperature": 0.2}',
        "llm.input_messages.0.message.role": "system",
        "llm.input_messages.0.message.content": "Be short.",
        "llm.input_messages.1.message.role": "user",
        "llm.input_messages.1.message.contents.0.message_content.type": "text",
        "llm.input_messages.1.message.contents.0.message_content.text": "12+7?",
        "llm.output_messages.0.message.role": "assistant",
        "llm.output_messages.0.message.tool_calls.0.tool_call.id": "c1",
        "llm.output_messages.0.message.tool_calls.0.tool_call.function.name": "add",
        "llm.output_messages.0.message.tool_calls.0.tool_call.function.arguments": '{"a": 12}',
        "llm.tools.0.tool.json_schema": '{"type": "function", "function": {"name": "add"}}',
        "llm.token_count.prompt": 11,
        "llm.token_count.completion": 5,
        "session.id": "s",
    }
    span = adopt_span(_span("a", 1, operation="internal", attributes=attributes))
    request, response = (json.loads(span.attributes[name]) for name in (names.REQUEST, names.RESPONSE))
    assert span.operation == "chat"
    assert request["messages"] == [{"role": "system", "content": "Be short."}, {"role": "user", "content": "12+7?"}]
    assert (request["model"], request["temperature"]) == ("gpt-4o", 0.2)
    assert request["tools"] == [{"type": "function", "function": {"name": "add"}}]
    (choice,) = response["choices"]
    assert choice["message"]["tool_calls"] == [
        {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 12}'}}
    ]
    assert span.attributes[names.INPUT_TOKENS] == 11
    assert span.attributes[names.OUTPUT_TOKENS] == 5
    assert span.attributes[names.CONVERSATION_ID] == "s"
    assert attributes.items() <= span.attributes.items()


def test_raw_bodies_of_openinference_are_used_as_they_are():
    raw = {"id": "chatcmpl-1", "choices": [{"index": 0, "message": {"role": "assistant", "content": "19"}}]}
    attributes = {
        "openinference.span.kind": "LLM",
        "input.value": json.dumps({"messages": [{"role": "user", "content": "x"}], "n": 2}),
        "output.value": json.dumps(raw),
    }
    span = adopt_span(_span("a", 1, operation="internal", attributes=attributes))
    assert json.loads(span.attributes[names.REQUEST])["n"] == 2
    assert json.loads(span.attributes[names.RESPONSE]) == raw
    assert span.attributes[names.RESPONSE_ID] == "chatcmpl-1"


def test_text_completions_of_other_instrumentors_are_model_calls():
    raw = {"id": "cmpl-1", "choices": [{"index": 0, "text": "19"}]}
    asked = {"prompt": "12+7=", "model": "m"}
    attributes = {"input.value": json.dumps(asked), "output.value": json.dumps(raw)}
    span = adopt_span(_span("a", 1, operation="internal", attributes={"openinference.span.kind": "LLM", **attributes}))
    assert (span.operation, span.attributes[names.RESPONSE_ID]) == ("chat", "cmpl-1")
    assert json.loads(span.attributes[names.REQUEST]) == asked
    genai = {"gen_ai.input.messages": json.dumps([{"role": "user", "parts": [{"type": "text", "content": "12+7="}]}])}
    span = adopt_span(_span("a", 1, operation="text_completion", attributes=genai))
    assert span.operation == "chat"
    assert json.loads(span.attributes[names.REQUEST])["messages"] == [{"role": "user", "content": "12+7="}]


def test_tool_and_agent_spans_of_openinference_become_ours():
    tool = {"openinference.span.kind": "TOOL", "tool.name": "add", "input.value": '{"a": 1}', "output.value": "2"}
    span = adopt_span(_span("a", 1, operation="internal", attributes=tool))
    assert span.operation == "execute_tool"
    told = [span.attributes[name] for name in (names.TOOL_NAME, names.TOOL_ARGUMENTS, names.TOOL_RESULT)]
    assert told == ["add", '{"a": 1}', "2"]
    nameless = replace(_span("a", 1, operation="internal", attributes={"openinference.span.kind": "AGENT"}), agent=None)
    agent = adopt_span(nameless)
    assert (agent.operation, agent.agent) == ("invoke_agent", agent.name)
    chain = _span("a", 1, operation="internal", attributes={"openinference.span.kind": "CHAIN"})
    assert adopt_span(chain) is chain


def test_a_chat_span_of_otel_genai_becomes_ours():
    attributes = {
        "gen_ai.system": "openai",
        "gen_ai.request.model": "gpt-4o",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.system_instructions": json.dumps([{"type": "text", "content": "Be short."}]),
        "gen_ai.input.messages": json.dumps(
            [
                {"role": "user", "parts": [{"type": "text", "content": "12+7?"}]},
                {
                    "role": "assistant",
                    "parts": [{"type": "tool_call", "id": "c", "name": "add", "arguments": {"a": 1}}],
                },
                {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c", "response": {"sum": 19}}]},
            ]
        ),
        "gen_ai.output.messages": json.dumps(
            [{"role": "assistant", "parts": [{"type": "text", "content": "19"}], "finish_reason": "stop"}]
        ),
        "gen_ai.tool.definitions": json.dumps([{"type": "function", "name": "add"}]),
        "gen_ai.usage.prompt_tokens": 3,
    }
    span = adopt_span(_span("a", 1, operation="chat", attributes=attributes))
    request, response = (json.loads(span.attributes[name]) for name in (names.REQUEST, names.RESPONSE))
    assert [message["role"] for message in request["messages"]] == ["system", "user", "assistant", "tool"]
    assert request["messages"][2]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a":1}'}
    assert request["messages"][3] == {"role": "tool", "tool_call_id": "c", "content": '{"sum":19}'}
    assert request["tools"] == [{"type": "function", "function": {"name": "add"}}]
    assert response["choices"] == [
        {"index": 0, "message": {"role": "assistant", "content": "19"}, "finish_reason": "stop"}
    ]
    assert span.attributes[names.PROVIDER] == "openai"
    assert span.attributes[names.INPUT_TOKENS] == 3


def test_what_is_said_beside_a_tools_result_is_kept(server):
    result = {"type": "tool_call_response", "id": "c", "response": "Closed."}
    asked = [
        {
            "role": "user",
            "parts": [
                {"type": "text", "content": "Here it is:"},
                result,
                {**result, "id": "d"},
                {"type": "reasoning", "content": "Well"},
                {"type": "text", "content": "And on Sundays?"},
                {"type": "text", "content": "Be short."},
            ],
        },
        {"role": "tool", "parts": [result, {"type": "text", "content": "Go on."}]},
        {"role": "assistant", "parts": [{"type": "tool_call", "id": "e", "name": "f", "arguments": "{}"}, result]},
    ]
    attributes = {"gen_ai.input.messages": json.dumps(asked)}
    assert _send(server, [_span("beside", 1, operation="chat", attributes=attributes)], key=server.key("beside"))
    (span,) = server.store.spans(attempt_ids=["beside"])
    tool = {"role": "tool", "content": "Closed."}
    call = {"id": "e", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert json.loads(span.attributes[names.REQUEST])["messages"] == [
        {"role": "user", "content": "Here it is:"},
        {**tool, "tool_call_id": "c"},
        {**tool, "tool_call_id": "d"},
        {"role": "user", "content": "And on Sundays?\nBe short."},
        {**tool, "tool_call_id": "c"},
        {"role": "user", "content": "Go on."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {**tool, "tool_call_id": "c"},
    ]


def test_an_answer_with_a_result_of_the_providers_own_tool_keeps_its_text():
    parts = [
        {"type": "tool_call_response", "id": "c", "response": "12 pages"},
        {"type": "text", "content": "I found 12."},
    ]
    given = {"gen_ai.output.messages": json.dumps([{"role": "assistant", "parts": parts, "finish_reason": "stop"}])}
    span = adopt_span(_span("a", 1, operation="chat", attributes=given))
    (choice,) = json.loads(span.attributes[names.RESPONSE])["choices"]
    assert choice["message"] == {"role": "assistant", "content": "I found 12."}


def test_our_own_spans_pass_unchanged():
    ours = _span("a", 1, operation="chat", attributes={names.REQUEST: "{}", names.RESPONSE: "{}", names.PROVIDER: "x"})
    assert adopt_span(ours) is ours
    both = {**ours.attributes, "gen_ai.input.messages": "[]", "gen_ai.output.messages": "[]"}
    assert adopt_span(replace(ours, attributes=both)).attributes == both


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
_NAMES = st.sampled_from([
    "openinference.span.kind", "input.value", "output.value", "llm.invocation_parameters", "agent.name", "tool.name",
    "llm.input_messages.0.message.role", "llm.input_messages.0.message.contents.0.message_content.text",
    "llm.input_messages.0.message.tool_calls.0.tool_call.function.arguments", "llm.tools.0.tool.json_schema",
    "gen_ai.input.messages", "gen_ai.output.messages", "gen_ai.system_instructions", "gen_ai.tool.definitions",
])  # fmt: skip


@settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow])
@given(
    attributes=st.dictionaries(_NAMES, _JSON | _JSON.map(json.dumps), max_size=8),
    kind=st.sampled_from(["LLM", "TOOL", "AGENT", "llm", ""]),
    operation=st.sampled_from(["internal", "chat", "generate_content", "text_completion"]),
)
def test_no_attributes_at_all_make_the_turning_fail(attributes, kind, operation):
    attributes = {**attributes, "openinference.span.kind": kind}
    span = adopt_span(_span("a", 1, operation=operation, attributes=attributes))
    assert attributes.keys() <= span.attributes.keys()
    dumps(to_json(span))


def _json_attribute(key, value):
    return {"key": key, "value": {"stringValue": value}}


def _span(attempt_id, number, *, rollout_id=None, operation="execute_tool", attributes=None):
    return Span(
        operation=operation,
        name="a span",
        trace_id=f"{abs(hash(attempt_id)) + 1:032x}"[-32:],
        span_id=f"{number:016x}",
        start_ns=number * 10,
        end_ns=number * 10 + 5,
        status="ok",
        agent="writer",
        rollout_id=rollout_id or (f"rollout of {attempt_id}" if attempt_id else None),
        attempt_id=attempt_id,
        attributes=attributes or {},
    )


def _send(server, spans, *, key):
    headers = {**PROTOBUF, "authorization": f"Bearer {key}"}
    return httpx.post(f"{server.url}/v1/traces", content=encode(spans), headers=headers)


def test_a_span_that_is_wrong_costs_no_other_of_its_request(tmp_path):
    from google.protobuf.json_format import MessageToDict
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
        ExportTraceServiceRequest,
        ExportTraceServiceResponse,
    )

    request = ExportTraceServiceRequest()
    request.ParseFromString(encode([_span("a", number) for number in range(1, 6)]))
    sent = request.resource_spans[0].scope_spans[0].spans
    sent[0].trace_id = b""  # no id
    sent[1].start_time_unix_nano = 2**63 + 1  # no time
    odd = sent[2].attributes.add()
    odd.key, odd.value.int_value = "gen_ai.agent.name", 7  # no name: stays an attribute
    as_json = MessageToDict(request)
    for span in as_json["resourceSpans"][0]["scopeSpans"][0]["spans"]:
        for name in ("traceId", "spanId"):
            if name in span:
                span[name] = base64.b64decode(span[name]).hex()
    bodies = {"application/x-protobuf": request.SerializeToString(), "application/json": json.dumps(as_json).encode()}
    for kind, body in bodies.items():
        folder = tmp_path / kind.rsplit("/", 1)[1]
        folder.mkdir()
        with served(folder) as server:
            headers = {"content-type": kind, "authorization": f"Bearer {server.key('a')}"}
            answer = httpx.post(f"{server.url}/v1/traces", content=body, headers=headers)
            assert answer.status_code == 200
            if kind == "application/json":
                told = answer.json()["partialSuccess"]
                assert (int(told["rejectedSpans"]), "2 are wrong" in told["errorMessage"]) == (2, True)
            else:
                response = ExportTraceServiceResponse.FromString(answer.content)
                assert response.partial_success.rejected_spans == 2
            assert [span.span_id for span in server.store.spans()] == [f"{n:016x}" for n in (3, 4, 5)]
            assert 'lightning_spans_total{outcome="rejected"} 2.0' in httpx.get(f"{server.url}/metrics").text


def test_a_span_that_the_store_refuses_costs_no_other_of_its_request(tmp_path):
    class Picky:
        def __init__(self, store):
            self._store = store

        def add_spans(self, spans):
            if any(span.span_id == f"{4:016x}" for span in spans):
                raise RefusedError("not this one")
            return self._store.add_spans(spans)

        def __getattr__(self, name):
            return getattr(self._store, name)

    with served(tmp_path, store=Picky(open_store(str(tmp_path / "s.db")))) as server:
        reply = _send(server, [_span("a", number) for number in range(1, 10)], key=server.key("a"))
        assert reply.status_code == 200
        assert b"not this one" in reply.content
        assert len(server.store.spans()) == 8
