"""Estimates from its bytes how much memory JSON takes when parsed, and how deeply it is nested."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

# Sizes of CPython's objects, rounded up: an object with one key is 184 bytes, a list 56, a short text 50, a number 32.
_OBJECT: Final = 200
_LIST: Final = 90
_ITEM: Final = 40
_TEXT: Final = 50
_WINDOW: Final = 1 << 18  # bytes that are processed together
_NOT_STRUCTURE: Final = bytes(set(range(256)) - set(b'"[]{}'))
_TEXTS: Final = re.compile(rb'"[^"]*"')
_PASSES: Final = 16  # passes over the brackets; replies and requests need three to ten


def too_heavy(body: bytes, most: int) -> bool:
    """Whether parsed JSON would take more than so many bytes of memory, not counting its texts.

    Counts of single bytes decide nearly all bodies: brackets and commas within texts only make them look larger.
    """
    if len(body) * _OBJECT <= most:  # if each byte were an object
        return False
    texts = body.count(b'"') // 2 * _TEXT
    if texts + _weight(body) <= most:
        return False
    for outside in _outside(body):
        texts += _weight(outside)
        if texts > most:
            return True
    return False


def has_more_containers(body: bytes, most: int) -> bool:
    """Whether JSON has more than so many objects and lists."""
    if len(body) <= most or _containers(body) <= most:
        return False
    found = 0
    for outside in _outside(body):
        found += _containers(outside)
        if found > most:
            return True
    return False


def deeper_than(body: bytes, data: Any, levels: int) -> bool:
    """Whether lists and objects of JSON are nested deeper than so many levels.

    Args:
        body: the JSON, which is valid.
        data: the same, parsed. Walking through it takes four times as long as parsing it, so that is done last.
        levels: at least twice `_PASSES`.
    """
    brackets = _structure(body)
    if len(brackets) <= 2 * levels:
        return False
    for _ in range(_PASSES):  # each pass removes the innermost level, or two
        brackets = brackets.replace(b"[]", b"").replace(b"{}", b"")
        if not brackets:
            return False
    return _is_deeper(data, levels)


def _structure(body: bytes) -> bytes:
    """Return the brackets of JSON outside texts."""
    if b"\\" in body:
        body = body.replace(rb"\\", b"").replace(rb"\"", b"")
    kept = body.translate(None, _NOT_STRUCTURE).replace(b'""', b"")  # what remains of nearly every text
    return _TEXTS.sub(b"", kept) if b'"' in kept else kept


def _is_deeper(data: Any, levels: int) -> bool:
    """Walk through parsed JSON level by level, without recursion."""
    layer: list[Any] = [data]
    for _ in range(levels + 1):
        held = [item for item in layer if isinstance(item, (dict, list))]
        if not held:
            return False
        layer = [inner for item in held for inner in (item.values() if isinstance(item, dict) else item)]
    return True


def _weight(text: bytes) -> int:
    return text.count(b"{") * _OBJECT + text.count(b"[") * _LIST + text.count(b",") * _ITEM


def _containers(text: bytes) -> int:
    return text.count(b"{") + text.count(b"[")


def _outside(body: bytes) -> Iterator[bytes]:
    """Yield what is outside texts, window by window."""
    if b"\\" in body:
        body = body.replace(rb"\\", b"").replace(rb"\"", b"")
    inside = False
    for start in range(0, len(body), _WINDOW):
        pieces = body[start : start + _WINDOW].split(b'"')
        yield b"".join(pieces[inside::2])
        inside ^= len(pieces) % 2 == 0
