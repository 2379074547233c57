"""Counts a protobuf body's messages and fields by walking over it, so that too large a body is never parsed.

An empty span is two bytes on the wire and fifty times as much in memory. Which fields contain messages is read from the
descriptors, so that future fields of OTLP are counted too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor

_MESSAGE: Final = 200  # bytes of memory, as protobuf's object and as ours
_FIELD: Final = 40
_HEAVIEST: Final = (_MESSAGE + _FIELD) // 2  # per byte: an empty message takes two
_DEEPEST: Final = 100  # protobuf's own limit
_VARINT, _FIXED64, _BLOCK, _FIXED32 = 0, 1, 2, 5
_FIXED: Final = {_FIXED64: 8, _FIXED32: 4}


class BrokenWireError(ValueError):
    """The body is not protobuf."""


def too_heavy(body: bytes, descriptor: Descriptor, most: int) -> bool:
    """Whether a parsed message would take more than so many bytes of memory, not counting its texts.

    Stops as soon as this is known: the rest cannot be larger than empty messages. So bodies of usual size cost nothing
    here. Invalid ones are left to protobuf itself, which stops at the same position.
    """
    tables: dict[str, dict[int, Descriptor]] = {}
    weight, place = 0, 0
    ends, kinds = [len(body)], [descriptor]
    try:
        while ends and weight + (len(body) - place) * _HEAVIEST > most:
            if place == ends[-1]:
                ends.pop()
                kinds.pop()
                continue
            inner = _inner(kinds[-1], tables)
            tag, place = _varint(body, place, ends[-1])
            weight += _FIELD
            wire = tag & 7
            if wire == _BLOCK:
                size, place = _varint(body, place, ends[-1])
                if place + size > ends[-1]:
                    return False
                child = inner.get(tag >> 3)
                if child is None:
                    place += size
                elif len(ends) > _DEEPEST:
                    return False
                else:
                    weight += _MESSAGE
                    ends.append(place + size)
                    kinds.append(child)
            elif wire == _VARINT:
                _, place = _varint(body, place, ends[-1])
            else:
                place += _FIXED.get(wire, 0)
                if place > ends[-1]:
                    return False
            if weight > most:
                return True
    except BrokenWireError:
        pass
    return False


def _inner(kind: Descriptor, tables: dict[str, dict[int, Descriptor]]) -> dict[int, Descriptor]:
    """Return the fields of a message that contain messages, by number."""
    table = tables.get(kind.full_name)
    if table is None:
        table = {field.number: field.message_type for field in kind.fields if field.message_type is not None}
        tables[kind.full_name] = table
    return table


def _varint(body: bytes, place: int, end: int) -> tuple[int, int]:
    number = shift = 0
    while place < end:
        byte = body[place]
        place += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, place
        shift += 7
        if shift > 63:
            break
    raise BrokenWireError("a number without an end")
