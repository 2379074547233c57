"""Spans in OpenTelemetry's protocol (OTLP), and a server's responses. `otlp_reader` reads spans back."""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lightning_spans.schema import spans as names
from lightning_spans.schema.spans import Json, Span, Status

PROTOBUF = "application/x-protobuf"
JSON = "application/json"

_LIFTED = {
    names.OPERATION: "operation",
    names.AGENT_NAME: "agent",
    names.ROLLOUT_ID: "rollout_id",
    names.ATTEMPT_ID: "attempt_id",
}
STATUS: dict[int, Status] = {0: "unset", 1: "ok", 2: "error"}
_CODE: dict[Status, int] = {status: code for code, status in STATUS.items()}
_SMALL = [bytes([number]) for number in range(0x80)]
_TIMES = struct.Struct("<BQBQ")
_TWO = struct.Struct("BB")
_DOUBLE = struct.Struct("<d")
_LABELS = frozenset({str, int, bool})  # no floats, because -0.0 equals 0.0
_LABEL = 64  # longest attribute, in characters, whose bytes are cached for the next span: names, labels, numbers
_KNOWN = 4096  # size of that cache
_known: dict[tuple[str, type, str | int], bytes] = {}


def flatten(span: Span) -> dict[str, Json]:
    """Return attributes together with the fields that OTel keeps as attributes: operation, agent, attempt and so on."""
    flat: dict[str, Json] = {names.SCHEMA: names.SCHEMA_VERSION, names.OPERATION: span.operation}
    if span.agent is not None:
        flat[names.AGENT_NAME] = span.agent
    if span.rollout_id is not None:
        flat[names.ROLLOUT_ID] = span.rollout_id
    if span.attempt_id is not None:
        flat[names.ATTEMPT_ID] = span.attempt_id
    if span.origin != names.TRAINING:
        flat[names.ORIGIN] = span.origin
    flat.update(span.attributes)
    return flat


def lift(rest: dict[str, Json]) -> dict[str, Any]:
    """Undo `flatten`: return keyword arguments of `Span` from OTel attributes, which become the span's own."""
    fields: dict[str, Any] = dict.fromkeys(_LIFTED.values())
    for key, field in _LIFTED.items():
        if isinstance(rest.get(key), str):  # a value of another type, put there by another library, stays an attribute
            fields[field] = rest.pop(key)
    rest.pop(names.SCHEMA, None)
    origin = rest.pop(names.ORIGIN, None)
    fields["origin"] = origin if isinstance(origin, str) and origin else names.TRAINING
    fields["operation"] = fields["operation"] or "internal"
    fields["attributes"] = rest
    return fields


# Written by hand, because protobuf's own objects would be slower in the agent's process. The numbers are those of
# opentelemetry/proto/trace/v1/trace.proto and common/v1/common.proto.


def encode(spans: Iterable[Span], *, resource: Mapping[str, str] | None = None) -> bytes:
    """Return an OTLP ``ExportTraceServiceRequest`` as protobuf bytes.

    Args:
        spans: the spans to send.
        resource: resource attributes; ``service.name`` is ``lightning`` by default.
    """
    about = {"service.name": "lightning", **(resource or {})}
    scope = _block(b"\x0a", _block(b"\x0a", b"lightning_spans"))
    sent = b"".join([_block(b"\x12", _span_bytes(span)) for span in spans])
    named = _block(b"\x0a", b"".join(_pair(b"\x0a", key, value) for key, value in about.items()))
    return _block(b"\x0a", named + _block(b"\x12", scope + sent))


def _span_bytes(span: Span) -> bytes:
    code = b"\x18" + _SMALL[_CODE[span.status]]
    parts = [
        b"\x0a\x10", bytes.fromhex(span.trace_id),
        b"\x12\x08", bytes.fromhex(span.span_id),
        _block(b"\x2a", _utf8(span.name)),
        b"\x30\x03" if span.operation == names.CHAT else b"\x30\x01",  # CLIENT, INTERNAL
        _TIMES.pack(0x39, span.start_ns, 0x41, span.end_ns),
        _block(b"\x7a", _block(b"\x12", _utf8(span.status_message)) + code if span.status_message else code),
    ]  # fmt: skip
    if span.parent_id:
        parts += (b"\x22\x08", bytes.fromhex(span.parent_id))
    for key, value in flatten(span).items():
        kind = type(value)
        known = _known.get((key, kind, value)) if kind in _LABELS else None
        parts.append(known or _attribute(key, value))
    return b"".join(parts)


def _attribute(key: str, value: Json) -> bytes:
    kind = type(value)
    if kind is str and len(value) > _LABEL:
        return _text(key, value)
    if kind is list and len(value) == 1 and type(value[0]) is str:  # the finish reasons
        return _only(key, value[0])
    if value is None:
        return b""
    made = _pair(b"\x4a", key, value)
    if kind in _LABELS:
        if len(_known) >= _KNOWN:
            _known.clear()
        _known[key, kind, value] = made
    return made


@functools.lru_cache(1024)
def _only(key: str, text: str) -> bytes:
    return _pair(b"\x4a", key, [text])


def _text(key: str, text: str) -> bytes:
    """Return `_pair` of a long text, in one step."""
    data = _utf8(text)
    size = _varint(len(data))
    whole = 1 + len(size) + len(data)
    named, sized = _key(key), _varint(whole)
    pair = _varint(len(named) + 1 + len(sized) + whole)
    return b"".join((b"\x4a", pair, named, b"\x12", sized, b"\x0a", size, data))


def _utf8(text: str) -> bytes:
    """Return UTF-8. A lone surrogate, as in half an emoji, becomes its escape, as in the SQL store."""
    return text.encode("utf-8", "backslashreplace")


def _varint(number: int) -> bytes:
    if number < 0x80:
        return _SMALL[number]
    if number < 0x4000:
        return _TWO.pack(number & 0x7F | 0x80, number >> 7)
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _block(tag: bytes, body: bytes) -> bytes:
    size = len(body)
    return tag + (_SMALL[size] if size < 0x80 else _varint(size)) + body


def _pair(tag: bytes, key: str, value: Json) -> bytes:
    return _block(tag, _key(key) + _block(b"\x12", _value(value)))


@functools.lru_cache(1024)
def _key(key: str) -> bytes:
    return _block(b"\x0a", _utf8(key))


def _value(value: Json) -> bytes:
    if isinstance(value, str):
        return _block(b"\x0a", _utf8(value))
    if isinstance(value, bool):
        return b"\x10\x01" if value else b"\x10\x00"
    if isinstance(value, int) and -(2**63) <= value < 2**63:  # a larger one is sent as text
        return b"\x18" + _varint(value & (2**64 - 1))
    if isinstance(value, float):
        return b"\x21" + _DOUBLE.pack(value)
    return b"" if value is None else _other(value)  # an absent value is an AnyValue with no field set


def _other(value: Json) -> bytes:
    if isinstance(value, Mapping):
        return _block(b"\x32", b"".join([_pair(b"\x0a", str(key), item) for key, item in value.items()]))
    if isinstance(value, Sequence):
        return _block(b"\x2a", b"".join([_block(b"\x0a", _value(item)) for item in value]))
    return _block(b"\x0a", _utf8(str(value)))


def count_rejected_spans(answer: bytes, content_type: str) -> int:
    """Read from a server's response how many spans it will never take; 0 if it does not say."""
    if not answer or content_type.split(";", maxsplit=1)[0].strip().lower() != PROTOBUF:
        return 0
    from google.protobuf.message import DecodeError
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

    response = ExportTraceServiceResponse()
    try:
        response.ParseFromString(answer)
    except DecodeError:
        return 0
    return int(response.partial_success.rejected_spans)
