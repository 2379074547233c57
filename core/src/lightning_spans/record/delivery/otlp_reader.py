"""Read spans from OpenTelemetry's protocol (OTLP): protobuf and JSON.

protobuf parses a span in a fifth of a microsecond; creating Python objects for its attributes one by one takes a
hundred times as long. Most attributes are the same bytes in each span (names, models, numbers). So a request is parsed
with a copy of OTLP's description in which an attribute stays bytes, and the parsed values are cached for the next span.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from lightning_spans.record.delivery.otlp import JSON, PROTOBUF, STATUS, lift
from lightning_spans.schema.json import read_json
from lightning_spans.schema.spans import Json, Span

if TYPE_CHECKING:
    from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue

_TRACE_ID: Final = re.compile("(?!0{32})[0-9a-f]{32}")
_SPAN_ID: Final = re.compile("(?!0{16})[0-9a-f]{16}")
_SHORT: Final = 128  # longest attribute that is cached, in bytes
_KNOWN: Final = 4096  # size of the cache
_PLAIN: Final = frozenset({str, bool, int, float})
_known: dict[bytes, tuple[str, Json]] = {}  # read-only values, which spans may share
_known_lists: dict[bytes, tuple[str, list[Json]]] = {}  # list attributes: each span gets its own list


def decode(body: bytes, content_type: str = PROTOBUF) -> list[Span]:
    """Read an OTLP ``ExportTraceServiceRequest``, completely or not at all.

    Raises:
        ValueError: as in `read`, or one of its spans is invalid.
    """
    spans, complaints = read(body, content_type)
    if complaints:
        raise ValueError(complaints[0])
    return spans


def read(body: bytes, content_type: str = PROTOBUF) -> tuple[list[Span], list[str]]:
    """Read an OTLP ``ExportTraceServiceRequest``. Spans of other libraries keep all their attributes.

    Args:
        body: the uncompressed request body.
        content_type: ``application/x-protobuf`` or ``application/json``.

    Returns:
        The spans, and for each invalid one the reason.

    Raises:
        ValueError: the body is not OTLP, or the content type is neither of the two.
    """
    kind = content_type.split(";", maxsplit=1)[0].strip().lower()
    complaints: list[str] = []
    if kind == PROTOBUF:
        return list(_decode_protobuf(body, complaints)), complaints
    if kind == JSON:
        return list(_decode_json(body, complaints)), complaints
    raise ValueError(f"content type {content_type!r}: OTLP is {PROTOBUF} or {JSON}")


def _decode_protobuf(body: bytes, complaints: list[str]) -> Iterator[Span]:
    from google.protobuf.message import DecodeError

    request_class, pair_class = _classes()
    request = request_class()
    try:
        request.ParseFromString(body)
        for batch in request.resource_spans:
            for scope in batch.scope_spans:
                for span in scope.spans:
                    try:
                        yield _protobuf_span(span, pair_class)
                    except ValueError as error:
                        complaints.append(str(error))
    except DecodeError as error:
        raise ValueError(f"not an OTLP protobuf body: {error}") from None


@functools.cache
def _classes() -> tuple[Any, type[KeyValue]]:
    """Return the class of a request whose spans have their attributes as bytes, and that of an attribute."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2
    from opentelemetry.proto.common.v1 import common_pb2
    from opentelemetry.proto.resource.v1 import resource_pb2
    from opentelemetry.proto.trace.v1 import trace_pb2

    pool = descriptor_pool.DescriptorPool()
    for module in (common_pb2, resource_pb2, trace_pb2, trace_service_pb2):
        file = descriptor_pb2.FileDescriptorProto.FromString(module.DESCRIPTOR.serialized_pb)
        for message in file.message_type:
            for field in message.field:
                if (message.name, field.name) == ("Span", "attributes"):
                    field.type = descriptor_pb2.FieldDescriptorProto.TYPE_BYTES
                    field.ClearField("type_name")
        pool.AddSerializedFile(file.SerializeToString())
    name = trace_service_pb2.ExportTraceServiceRequest.DESCRIPTOR.full_name
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(name)), common_pb2.KeyValue


def _protobuf_span(span: Any, pair_class: type[KeyValue]) -> Span:
    attributes: dict[str, Json] = {}
    for data in span.attributes:
        key, value = _known.get(data) or _attribute(data, pair_class)
        attributes[key] = value
    status = span.status
    return _span(
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        name=span.name,
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        code=status.code,
        message=status.message,
        attributes=attributes,
    )


def _attribute(data: bytes, pair_class: type[KeyValue]) -> tuple[str, Json]:
    """Read an attribute, and cache it if the next span may have the same."""
    if (items := _known_lists.get(data)) is not None:
        return items[0], items[1].copy()
    pair = pair_class.FromString(data)
    key, value = pair.key, _read_value(pair.value)
    if len(data) <= _SHORT:
        if type(value) in _PLAIN:
            _keep(_known, data, (key, value))
        elif type(value) is list and all(type(item) in _PLAIN for item in value):
            _keep(_known_lists, data, (key, value.copy()))
    return key, value


def _keep(known: dict[bytes, tuple[str, Any]], data: bytes, pair: tuple[str, Any]) -> None:
    if len(known) >= _KNOWN:
        known.clear()
    known[data] = pair


def _read_value(value: AnyValue) -> Json:
    if text := value.string_value:
        return text
    kind = value.WhichOneof("value")
    if kind is None:
        return None
    if kind == "array_value":
        return [_read_value(item) for item in value.array_value.values]
    if kind == "kvlist_value":
        return {pair.key: _read_value(pair.value) for pair in value.kvlist_value.values}
    if kind == "bytes_value":
        return value.bytes_value.hex()
    return getattr(value, kind)


def _decode_json(body: bytes, complaints: list[str]) -> Iterator[Span]:
    try:
        request = read_json(body)
        spans = [
            span
            for batch in request.get("resourceSpans", [])
            for scope in batch.get("scopeSpans", [])
            for span in scope.get("spans", [])
        ]
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"not an OTLP JSON body: {type(error).__name__}: {error}") from None
    for span in spans:
        try:
            yield _json_span(span)
        except (KeyError, TypeError, AttributeError, RecursionError, ValueError) as error:
            known = type(error) is ValueError  # our own parser, which reports what is wrong
            complaints.append(str(error) if known else f"not an OTLP JSON span: {type(error).__name__}: {error}")


def _json_span(span: Mapping[str, Json]) -> Span:
    status = span.get("status") or {}  # null means a field's default in the JSON form of protobuf
    return _span(
        trace_id=span["traceId"].lower(),
        span_id=span["spanId"].lower(),
        parent_id=(span.get("parentSpanId") or "").lower(),
        name=_json_text(span, "name"),
        start_ns=int(span["startTimeUnixNano"]),
        end_ns=int(span["endTimeUnixNano"]),
        code=_status_code(status.get("code", 0)),
        message=_json_text(status, "message"),
        attributes={_json_text(p, "key"): _read_json(p.get("value") or {}) for p in span.get("attributes") or []},
    )


def _json_text(holder: Mapping[str, Json], name: str) -> str:
    value = holder.get(name)
    if not isinstance(value, str | None):
        raise ValueError(f"a span's {name} must be a string, not {value!r:.100}")
    return value or ""


def _status_code(code: int | str) -> int:
    return code if isinstance(code, int) else {"STATUS_CODE_OK": 1, "STATUS_CODE_ERROR": 2}.get(code, 0)


def _read_json(value: Mapping[str, Json]) -> Json:
    if "arrayValue" in value:
        return [_read_json(item) for item in value["arrayValue"].get("values") or []]
    if "kvlistValue" in value:
        pairs = value["kvlistValue"].get("values") or []
        return {_json_text(pair, "key"): _read_json(pair.get("value") or {}) for pair in pairs}
    if "intValue" in value:
        return int(value["intValue"])  # proto3 JSON writes 64-bit integers as strings
    if "doubleValue" in value:
        return float(value["doubleValue"])
    return next(iter(value.values()), None)


def _span(
    *,
    trace_id: str,
    span_id: str,
    parent_id: str,
    name: str,
    start_ns: int,
    end_ns: int,
    code: int,
    message: str,
    attributes: dict[str, Json],
) -> Span:
    ids_are_good = _TRACE_ID.fullmatch(trace_id) and _SPAN_ID.fullmatch(span_id)
    if not ids_are_good or (parent_id and not _SPAN_ID.fullmatch(parent_id)):
        raise ValueError(f"span {name!r}: ids must be 32 and 16 hex digits, not {trace_id!r} and {span_id!r}")
    if not 0 <= start_ns < 2**63 or not 0 <= end_ns < 2**63:
        raise ValueError(f"span {name!r}: its times, {start_ns} and {end_ns}, are not Unix times in nanoseconds")
    return Span(
        name=name,
        trace_id=trace_id,
        span_id=span_id,
        parent_id=parent_id or None,
        start_ns=start_ns,
        end_ns=max(start_ns, end_ns),
        status=STATUS.get(code, "unset"),
        status_message=message,
        **lift(attributes),
    )
