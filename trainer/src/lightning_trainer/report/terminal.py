"""Text of agents, tools and model servers on a terminal: shown, never interpreted."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

_SHOWN_AS: Final = "\N{REPLACEMENT CHARACTER}"


def printable(text: str, *, lines: bool = False) -> str:
    """Return a text with all unprintable characters (escapes, bells, invisible and direction marks) shown as �.

    Args:
        text: any.
        lines: keep line breaks and tabs.

    Returns:
        A text of the same length.
    """
    if text.isprintable():
        return text
    kept = "\n\t" if lines else ""
    return "".join(letter if letter.isprintable() or letter in kept else _SHOWN_AS for letter in text)


def decimal(value: float) -> str:
    """Return a reward for people: with three decimals, or as a power of ten from a million on."""
    return f"{value:.3f}" if abs(value) < 1e6 else f"{value:.3g}"


def tokens(number: int) -> str:
    """Return a number of tokens as text; a dash if none were counted."""
    return str(number) if number else "-"


def some(words: Sequence[str], most: int = 10) -> str:
    """Return comma-separated words; if there are many, the first ones and how many more there are."""
    more = f" and {len(words) - most:,} more" if len(words) > most else ""
    return f"{', '.join(words[:most])}{more}"


class PrintableFormatter(logging.Formatter):
    """Formats a log message as one line, whatever it contains; tracebacks keep their lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        """Return the line."""
        return printable(super().formatMessage(record))

    def formatException(self, ei: object) -> str:  # noqa: N802 - logging's name
        """Return the traceback, indented so that none of its lines can pass for a line of the log."""
        text = super().formatException(ei)  # type: ignore[arg-type]
        return "\n".join(f"  {line}" for line in printable(text, lines=True).splitlines())
