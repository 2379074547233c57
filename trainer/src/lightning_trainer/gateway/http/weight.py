"""How much memory JSON will take once it is parsed, told from its bytes: what would be too much is never parsed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

# What CPython's objects take, rounded up: an object with one key is 184 bytes, a list 56, a short text 50, a number 32.
_OBJECT: Final = 200
_LIST: Final = 90
_ITEM: Final = 40
_TEXT: Final = 50
_WINDOW: Final = 1 << 18  # bytes that are looked at together


def too_heavy(body: bytes, most: int) -> bool:
    """Whether parsed JSON would take more than so many bytes of memory, beside its texts.

    Counts of single bytes settle nearly all bodies: brackets and commas inside of texts only make them look heavier.
    """
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
    if _containers(body) <= most:
        return False
    found = 0
    for outside in _outside(body):
        found += _containers(outside)
        if found > most:
            return True
    return False


def _weight(text: bytes) -> int:
    return text.count(b"{") * _OBJECT + text.count(b"[") * _LIST + text.count(b",") * _ITEM


def _containers(text: bytes) -> int:
    return text.count(b"{") + text.count(b"[")


def _outside(body: bytes) -> Iterator[bytes]:
    """Give what stands outside of texts, window by window."""
    if b"\\" in body:
        body = body.replace(rb"\\", b"").replace(rb"\"", b"")
    inside = False
    for start in range(0, len(body), _WINDOW):
        pieces = body[start : start + _WINDOW].split(b'"')
        yield b"".join(pieces[inside::2])
        inside ^= len(pieces) % 2 == 0
