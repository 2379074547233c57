from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_spans.record.delivery.otlp import JSON, PROTOBUF, encode
from lightning_spans.record.delivery.otlp_reader import decode
from lightning_spans.schema.json import from_json, to_json
from lightning_spans.schema.spans import Span

text = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=20)
integers = st.integers(min_value=-(2**63), max_value=2**63 - 1)
floats = st.floats(allow_nan=False)
plain = st.one_of(text, st.booleans(), integers, floats)
values = st.one_of(plain, st.lists(plain, max_size=4), st.dictionaries(text, plain, max_size=3))
hex32 = st.integers(min_value=1, max_value=2**128 - 1).map(lambda n: f"{n:032x}")
hex16 = st.integers(min_value=1, max_value=2**64 - 1).map(lambda n: f"{n:016x}")
times = st.integers(min_value=0, max_value=2**63 - 1)
attributes = st.dictionaries(text.map(lambda key: f"app.{key}"), values, max_size=6)
names = st.none() | text.filter(bool)


@st.composite
def spans(draw):
    start, end = sorted([draw(times), draw(times)])
    return Span(
        operation=draw(st.sampled_from(["chat", "execute_tool", "invoke_agent", "internal"])),
        name=draw(text),
        trace_id=draw(hex32),
        span_id=draw(hex16),
        parent_id=draw(st.none() | hex16),
        start_ns=start,
        end_ns=end,
        status=draw(st.sampled_from(["ok", "error", "unset"])),
        status_message=draw(text),
        agent=draw(names),
        rollout_id=draw(names),
        attempt_id=draw(names),
        attributes=draw(attributes),
    )


@given(st.lists(spans(), max_size=4))
def test_protobuf_keeps_every_field(batch):
    assert decode(encode(batch), PROTOBUF) == batch


@given(spans())
def test_json_lines_keep_every_field(span):
    assert from_json(Span, json.loads(json.dumps(to_json(span)))) == span


def test_otlp_json_as_other_exporters_write_it_is_read():
    body = {
        "resourceSpans": [
            {
                "resource": {"attributes": [{"key": "service.name", "value": {"stringValue": "app"}}]},
                "scopeSpans": [
                    {
                        "spans": [
                            {
                                "traceId": "5B8EFFF798038103D269B633813FC60C",
                                "spanId": "EEE19B7EC3C1B174",
                                "parentSpanId": "",
                                "name": "chat gpt",
                                "kind": 3,
                                "startTimeUnixNano": "1544712660000000000",
                                "endTimeUnixNano": "1544712661000000000",
                                "attributes": [
                                    {"key": "gen_ai.operation.name", "value": {"stringValue": "chat"}},
                                    {"key": "gen_ai.agent.name", "value": {"stringValue": "writer"}},
                                    {"key": "gen_ai.usage.input_tokens", "value": {"intValue": "12"}},
                                    {"key": "ok", "value": {"boolValue": True}},
                                    {"key": "list", "value": {"arrayValue": {"values": [{"doubleValue": 0.5}]}}},
                                ],
                                "status": {"code": "STATUS_CODE_ERROR", "message": "no"},
                            }
                        ]
                    }
                ],
            }
        ]
    }
    (span,) = decode(json.dumps(body).encode(), JSON + "; charset=utf-8")
    assert span == Span(
        operation="chat",
        name="chat gpt",
        agent="writer",
        trace_id="5b8efff798038103d269b633813fc60c",
        span_id="eee19b7ec3c1b174",
        start_ns=1544712660000000000,
        end_ns=1544712661000000000,
        status="error",
        status_message="no",
        attributes={"gen_ai.usage.input_tokens": 12, "ok": True, "list": [0.5]},
    )


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b"\xff\xff", PROTOBUF),
        (b"{", JSON),
        (b"[]", JSON),
        (b'{"resourceSpans": [{"scopeSpans": [{"spans": [{}]}]}]}', JSON),
        (b"", "text/plain"),
    ],
)
def test_what_is_not_otlp_is_a_value_error(body, kind):
    with pytest.raises(ValueError, match="OTLP"):
        decode(body, kind)


def test_ids_that_are_no_ids_are_refused():
    span = Span(operation="chat", name="x", trace_id="0" * 32, span_id="1" * 16, start_ns=0, end_ns=0)
    with pytest.raises(ValueError, match="hex digits"):
        decode(encode([span]))


@pytest.mark.parametrize(
    ("value", "arrives"),
    [(2**63, str(2**63)), ("half \ud83d", "half \\ud83d"), ({"\ud83d": -(2**64)}, {"\\ud83d": str(-(2**64))})],
)
def test_one_value_that_the_format_can_not_hold_does_not_lose_the_batch(value, arrives):
    odd = Span(
        operation="chat",
        name="\ud83d",
        trace_id="1" * 32,
        span_id="1" * 16,
        start_ns=1,
        end_ns=2,
        attributes={"a": value},
    )
    (back,) = decode(encode([odd]))
    assert back.attributes["a"] == arrives


def test_values_that_are_equal_but_not_the_same_keep_their_kind():
    given = [0.0, -0.0, 0, False, 1, True, 1.0, "1", ["1"], ["1", "1"]]  # what one leaves behind is not another's
    for value in [*given, *reversed(given)]:
        ids = {"trace_id": "1" * 32, "span_id": "1" * 16}
        given_one = Span(operation="chat", name="x", start_ns=0, end_ns=0, attributes={"x": value}, **ids)
        (span,) = decode(encode([given_one]))
        assert repr(span.attributes["x"]) == repr(value)


def test_spans_share_no_value_that_can_be_changed():
    ids = {"trace_id": "1" * 32, "span_id": "1" * 16}
    body = encode(
        [Span(operation="chat", name="x", start_ns=0, end_ns=0, attributes={"x": ["a"], "y": {"z": 1}}, **ids)]
    )
    decode(body)
    (changed,) = decode(body)
    changed.attributes["x"].append("b")
    changed.attributes["y"]["z"] = 2
    (span,) = decode(body)
    assert span.attributes == {"x": ["a"], "y": {"z": 1}}


def test_an_attribute_that_is_broken_is_an_error_of_the_body():
    body = encode(
        [Span(operation="chat", name="x", trace_id="1" * 32, span_id="1" * 16, start_ns=0, end_ns=0, agent="ab")]
    )
    with pytest.raises(ValueError, match="OTLP"):
        decode(body.replace(b"\x12\x04\x0a\x02ab", b"\x12\x04\x0a\x09ab"))
