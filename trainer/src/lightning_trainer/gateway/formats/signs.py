"""The sign before the text of a control token, so that ordinary letters are never mistaken for it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

SIGN: Final = "\ud800"  # no tokenizer produces half of a pair


def signed(text: str, kept: Iterable[str]) -> str:
    """Return a text with the sign before each control token's text."""
    for mark in kept:
        text = text.replace(mark, f"{SIGN}{mark}")
    return text


def plain(text: str) -> str:
    """Return a text without signs."""
    return text.replace(SIGN, "") if SIGN in text else text
