"""Counts with nouns in messages: 1 task, 2 tasks."""

from __future__ import annotations


def amount(count: int, noun: str) -> str:
    """Return a count with its noun, which takes an s unless the count is 1."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
