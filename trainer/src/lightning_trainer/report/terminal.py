"""Text of agents, tools and model servers on a terminal: shown, never obeyed."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

_SHOWN_AS: Final = "\N{REPLACEMENT CHARACTER}"


def printable(text: str, *, lines: bool = False) -> str:
    """Return a text with everything that does not print (escapes, bells, invisible and direction marks) shown as �.

    Args:
        text: any.
        lines: leave line breaks and tabs.

    Returns:
        A text of the same length.
    """
    if text.isprintable():
        return text
    kept = "\n\t" if lines else ""
    return "".join(letter if letter.isprintable() or letter in kept else _SHOWN_AS for letter in text)


def decimal(value: float) -> str:
    """Return a reward as people read it: with three decimals, or as a power of ten from a million on."""
    return f"{value:.3f}" if abs(value) < 1e6 else f"{value:.3g}"


def tokens(number: int) -> str:
    """Write how many tokens there were; a dash where nobody counted any."""
    return str(number) if number else "-"


def some(words: Sequence[str], most: int = 10) -> str:
    """Return words with commas between; of many the first, and how many more there are."""
    more = f" and {len(words) - most:,} more" if len(words) > most else ""
    return f"{', '.join(words[:most])}{more}"


class PrintableFormatter(logging.Formatter):
    """A log line that is one line, whatever is in its message; tracebacks keep theirs."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        """Return the line."""
        return printable(super().formatMessage(record))

    def formatException(self, ei: object) -> str:  # noqa: N802 - logging's name
        """Return the traceback, indented: none of its lines can pass for a line of the log."""
        text = super().formatException(ei)  # type: ignore[arg-type]
        return "\n".join(f"  {line}" for line in printable(text, lines=True).splitlines())
