"""Reasons: a text that records contain, and a slug that names it in metrics."""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """Reasons of one kind. A reason is its text, so that it is the same in records and in JSON."""

    @property
    def slug(self) -> str:
        """Its name in metrics."""
        return slug(self)


def slug(reason: str) -> str:
    """Return the metrics name of a reason read from a record: its text before the colon."""
    return reason.split(":", maxsplit=1)[0].replace(" ", "_")
